//! Where a server listens, as people type it.

use std::str::FromStr;

/// Host and port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Name or IP address, without brackets.
    pub host: String,
    /// 0 to listen on any free port.
    pub port: u16,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for Address {
    type Err = String;

    /// Reads `HOST:PORT`, where an IPv6 address stands in brackets.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("invalid address `{text}`: expected HOST:PORT, such as 127.0.0.1:29500");
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let host =
            host.strip_prefix('[').map_or(Some(host), |host| host.strip_suffix(']')).ok_or_else(bad)?;
        let port = port.parse().map_err(|_| bad())?;
        if host.is_empty() { Err(bad()) } else { Ok(Address { host: host.into(), port }) }
    }
}

/// Reads the address of a server that is running, so port 0 is refused.
///
/// # Errors
/// If the text is not an address with a port; the error says what is expected.
pub fn parse_address(text: &str) -> Result<Address, String> {
    match text.parse::<Address>()? {
        Address { port: 0, .. } => {
            Err(format!("invalid address `{text}`: a server does not listen on port 0"))
        }
        address => Ok(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for text in ["127.0.0.1:29500", "localhost:1", "[::1]:80"] {
            assert_eq!(parse_address(text).unwrap().to_string(), text);
        }
        for wrong in ["train.py", "80", ":80", "host:", "host:65536", "[::1:80", ""] {
            assert!(parse_address(wrong).unwrap_err().contains("expected HOST:PORT"), "{wrong}");
        }
        assert!("a:0".parse::<Address>().is_ok());
        assert!(parse_address("a:0").unwrap_err().contains("port 0"));
    }
}
