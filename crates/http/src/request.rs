//! A request as a handler sees it: complete, checked, and not decoded further.

use std::fmt;

/// The method. All others are refused before a handler sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Asks for a page.
    Get,
    /// As [`Method::Get`]; the server leaves the body out.
    Head,
    /// Only if a server accepts bodies: see [`crate::HeadLimits::body`].
    Post,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: Vec<Header>,
    pub(crate) keep_alive: bool,
    /// The length of the body according to the head.
    pub(crate) body_length: usize,
    pub(crate) body: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// In lower case.
    pub(crate) name: String,
    /// Without the white space around it; any bytes except control characters.
    pub(crate) value: Vec<u8>,
}

/// Names and values, decoded.
pub type Parameters = Vec<(Vec<u8>, Vec<u8>)>;

/// The most parameters in one query; more are a mistake.
const PARAMETERS_MAX: usize = 32;

impl Request {
    /// What is asked for.
    pub fn method(&self) -> Method {
        self.method
    }

    /// The path as it was sent, not decoded: routes are exact matches, so `..` and `%2e` have no effect.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The complete body of a `POST`.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// How many bytes of body follow the head.
    pub fn body_length(&self) -> usize {
        self.body_length
    }

    /// The first header of this name, whatever its case; nothing if it is not text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.values(name).next().and_then(|value| std::str::from_utf8(value).ok())
    }

    pub(crate) fn values(&self, name: &str) -> impl Iterator<Item = &[u8]> {
        self.headers
            .iter()
            .filter(move |header| header.name.eq_ignore_ascii_case(name))
            .map(|header| header.value.as_slice())
    }

    /// The bytes of the parameter `name` of the query (`?name=value&…`): `%41` is `A`, `+` is a space.
    ///
    /// Anything ambiguous is an error: a broken escape, the same name twice, too many names.
    pub fn parameter(&self, name: &str) -> Result<Option<Vec<u8>>, QueryError> {
        let mut found = None;
        for (key, value) in decode_pairs(&self.query)? {
            if key == name.as_bytes() && found.replace(value).is_some() {
                return Err(QueryError("it names a parameter twice"));
            }
        }
        Ok(found)
    }

    /// All parameters of the query in order, as for [`Request::parameter`]; a name may occur twice.
    pub fn parameters(&self) -> Result<Parameters, QueryError> {
        decode_pairs(&self.query)
    }
}

/// `name=value&…`, as in a query or in a body of type `application/x-www-form-urlencoded`.
pub fn decode_pairs(text: &str) -> Result<Parameters, QueryError> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    if pairs.clone().nth(PARAMETERS_MAX).is_some() {
        return Err(QueryError("it has more than 32 parameters"));
    }
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decode(key)?, decode(value)?))
        })
        .collect()
}

fn decode(text: &str) -> Result<Vec<u8>, QueryError> {
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        bytes.push(match (first, tail) {
            (b'+', _) => b' ',
            (b'%', &[high, low, ..]) => {
                rest = &tail[2..];
                match (digit(high), digit(low)) {
                    (Some(high), Some(low)) => high << 4 | low,
                    _ => return Err(BROKEN_ESCAPE),
                }
            }
            (b'%', _) => return Err(BROKEN_ESCAPE),
            _ => first,
        });
    }
    Ok(bytes)
}

const BROKEN_ESCAPE: QueryError = QueryError("a `%` is not followed by two hexadecimal digits");

/// What is wrong with a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryError(&'static str);

impl fmt::Display for QueryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the query cannot be read: {}", self.0)
    }
}

impl std::error::Error for QueryError {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn asking(query: &str) -> Request {
        let (path, query, headers) = ("/".into(), query.into(), Vec::new());
        Request {
            method: Method::Get,
            path,
            query,
            headers,
            keep_alive: true,
            body_length: 0,
            body: Vec::new(),
        }
    }

    fn parameter(query: &str) -> Result<Option<String>, QueryError> {
        let found = asking(query).parameter("key")?;
        Ok(found.map(|value| String::from_utf8_lossy(&value).into_owned()))
    }

    #[test]
    fn a_parameter_is_decoded_once_and_strictly() {
        let good = [
            ("key=a/b", "a/b"),
            ("other=1&key=a%2Fb", "a/b"),
            ("key=a+b%2B", "a b+"),
            ("key=%2541", "%41"),
            ("k%65y=1", "1"),
            ("key=a=b", "a=b"),
            ("key", ""),
            ("&&key=1&", "1"),
        ];
        for (query, value) in good {
            assert_eq!(parameter(query), Ok(Some(value.into())), "{query}");
        }
        assert_eq!(parameter(""), Ok(None));
        assert_eq!(parameter("Key=1"), Ok(None));
        for query in ["key=%", "key=%4", "key=%4g", "key=%+1", "other=%zz&key=1"] {
            assert_eq!(parameter(query), Err(BROKEN_ESCAPE), "{query}");
        }
        let error = parameter("key=1&key=2").unwrap_err();
        assert_eq!(error.to_string(), "the query cannot be read: it names a parameter twice");
        let error = parameter(&"a=1&".repeat(33)).unwrap_err();
        assert_eq!(error.to_string(), "the query cannot be read: it has more than 32 parameters");
    }

    proptest! {
        #[test]
        fn every_byte_survives_being_escaped(bytes in prop::collection::vec(any::<u8>(), 0..50)) {
            let escaped: String = bytes.iter().map(|byte| format!("%{byte:02x}")).collect();
            prop_assert_eq!(asking(&format!("key={escaped}")).parameter("key"), Ok(Some(bytes)));
        }
    }
}
