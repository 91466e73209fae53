//! Which hosts a request may name.
//!
//! A web page can make its own name resolve to our address (DNS rebinding) and then read our answers as its
//! own. The browser still sends that name in `Host`, so a name that was not configured is refused. An address
//! is not a name: a page that was loaded from our address is ours.

use std::net::IpAddr;

/// May `host`, the value of a `Host` header, be answered on a connection to our address `local`?
pub(crate) fn is_ours(host: &str, local: IpAddr, names: &[String]) -> bool {
    let Some(name) = name_of(host) else { return false };
    if let Ok(address) = name.parse::<IpAddr>() {
        let address = address.to_canonical();
        if address.is_loopback() || address == local.to_canonical() {
            return true;
        }
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || names.iter().any(|ours| ours.eq_ignore_ascii_case(name))
}

/// If a page sent this: is it one of our own? Browsers name in `Origin` the site whose page sends a `POST`,
/// which needs no permission to be sent to any address. Programs other than browsers send no `Origin`.
pub(crate) fn is_own_page(origin: Option<&str>, host: &str) -> bool {
    origin.is_none_or(|origin| {
        let (scheme, sender) = origin.split_once("://").unwrap_or_default();
        scheme.eq_ignore_ascii_case("http") && sender.eq_ignore_ascii_case(host)
    })
}

/// The name or address in `name`, `name:port`, `[v6]` or `[v6]:port`. Any port is accepted: a user may
/// forward one.
fn name_of(host: &str) -> Option<&str> {
    let (name, rest) = match host.strip_prefix('[') {
        Some(v6) => v6.split_once(']')?,
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let port_is_fine = match rest.strip_prefix(':') {
        Some(port) => port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit()),
        None => rest.is_empty(),
    };
    (port_is_fine && !name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_ours_if_it_came_from_the_host_that_is_asked() {
        assert!(is_own_page(None, "localhost:80"));
        assert!(is_own_page(Some("http://localhost:80"), "LOCALHOST:80"));
        for origin in
            ["null", "", "http://localhost", "https://localhost:80", "http://evil.example", "localhost:80"]
        {
            assert!(!is_own_page(Some(origin), "localhost:80"), "{origin}");
        }
    }

    #[test]
    fn our_address_loopback_and_names_given_are_ours_and_nothing_else() {
        let local = IpAddr::from([10, 0, 0, 5]);
        let names = ["node-7.cluster".to_owned()];
        let ours = |host: &str| is_ours(host, local, &names);
        for host in [
            "10.0.0.5",
            "10.0.0.5:8080",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:29580",
            "[::1]",
            "[::ffff:10.0.0.5]",
            "localhost",
            "LocalHost:65535",
            "localhost.",
            "Node-7.Cluster:80",
        ] {
            assert!(ours(host), "{host}");
        }
        for host in [
            "",
            ":80",
            "10.0.0.6",
            "evil.example",
            "localhost.evil.example",
            "evil.localhost",
            "localhost:80:80",
            "localhost:http",
            "localhost:123456",
            "[::1",
            "::1",
            "[::1]80",
            "10.0.0.5.evil.example",
            "localhost ",
            "0.0.0.0",
        ] {
            assert!(!ours(host), "{host}");
        }
    }
}
