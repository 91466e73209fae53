//! Where a worker server listens, as one writes it: the path of a socket, or a host and a port.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// `/tmp/rank-0.sock`, `./rank-0.sock`, `127.0.0.1:0`, `[::1]:7000`: what has a slash is a path.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Endpoint {
    /// A Unix socket.
    Socket(PathBuf),
    /// A name or an address without brackets.
    Tcp {
        /// The name or address.
        host: String,
        /// The port; 0 for a free one.
        port: u16,
    },
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if text.contains('/') {
            return Ok(Endpoint::Socket(text.into()));
        }
        let wrong = || EndpointError(text.to_string());
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().map_err(|_| wrong())?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or_else(wrong)?,
            None if host.contains(':') => return Err(wrong()),
            None => host,
        };
        if host.is_empty() { Err(wrong()) } else { Ok(Endpoint::Tcp { host: host.to_string(), port }) }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Socket(path) => path.display().fmt(f),
            Endpoint::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Endpoint::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// Neither of the two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointError(String);

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is neither the path of a socket nor a host and a port", self.0)
    }
}

impl EndpointError {
    /// What would be right.
    pub const HINT: &str =
        "say a path with a slash in it, as in `/tmp/rank-0.sock`, or an address such as `127.0.0.1:7000`";
}

impl std::error::Error for EndpointError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_a_slash_is_a_path_and_the_rest_is_a_host_and_a_port() {
        let tcp = |host: &str, port| Ok(Endpoint::Tcp { host: host.to_string(), port });
        assert_eq!("./a:1".parse(), Ok(Endpoint::Socket("./a:1".into())));
        assert_eq!("127.0.0.1:0".parse(), tcp("127.0.0.1", 0));
        assert_eq!("node-7:7000".parse(), tcp("node-7", 7000));
        assert_eq!("[::]:7000".parse(), tcp("::", 7000));
        for wrong in ["", "a", "a:", ":1", "a:b", "a:65536", "a:-1", "::1:5", "[::1:5", "[]:5"] {
            let error = wrong.parse::<Endpoint>().expect_err(wrong);
            assert_eq!(
                error.to_string(),
                format!("`{wrong}` is neither the path of a socket nor a host and a port")
            );
        }
        for text in ["/a/b", "a:1", "[::1]:2"] {
            assert_eq!(text.parse::<Endpoint>().map(|endpoint| endpoint.to_string()), Ok(text.to_string()));
        }
    }
}
