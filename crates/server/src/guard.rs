//! Access: API keys, the origins of web pages, and the host names of the server.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::{HeaderMap, HeaderValue, header};
use forebay_engine::{Client, Error, Tenant};
use ring::rand::SystemRandom;
use ring::{digest, hmac};

use crate::error::ApiError;

/// Where a request comes from, and which checks it has to pass.
///
/// # Examples
/// ```
/// use forebay_server::Caller;
///
/// // A request that another server of the program has received. It has checked the host name, but knows no keys.
/// let caller = Caller::trusted().peer("192.0.2.7:40000".parse()?).check_keys();
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) checks_keys: bool,
    pub(crate) checks_names: bool,
}

impl Caller {
    /// The program itself, or somebody whom it has checked. No key is needed, any host name and origin is allowed, and a client has
    /// no limit of its own.
    pub fn trusted() -> Caller {
        Caller { peer: None, checks_keys: false, checks_names: false }
    }

    /// The other end of a connection, with all checks, as for the server's own connections.
    pub fn connection(peer: SocketAddr) -> Caller {
        Caller::trusted().peer(peer).check_keys().check_names()
    }

    /// The other end of the connection. Unless requests have keys, it is the client, who gets at most three quarters of the places.
    pub fn peer(self, peer: SocketAddr) -> Caller {
        Caller { peer: Some(peer), ..self }
    }

    /// If the server has keys, the request needs one. The owner of a key is one client.
    pub fn check_keys(self) -> Caller {
        Caller { checks_keys: true, ..self }
    }

    /// The host name and the origin of the request are checked, which protects against web pages of others.
    pub fn check_names(self) -> Caller {
        Caller { checks_names: true, ..self }
    }
}

/// Counts the requests that come through no connection.
static REQUESTS: AtomicU64 = AtomicU64::new(0);

/// The API keys of the server; without keys it is open to everybody.
pub struct Keys {
    /// Random for each start, so that the compared values reveal nothing about a key.
    secret: hmac::Key,
    tags: Vec<hmac::Tag>,
}

impl Keys {
    /// # Errors
    /// If a key is empty, or the system gives no random numbers to compare keys with.
    pub fn new(keys: &[String]) -> Result<Keys, Error> {
        if keys.iter().any(|key| key.trim().is_empty()) {
            return Err(Error::Invalid("a key in ServerOptions::keys is empty".into()));
        }
        let secret = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new()).map_err(|_| {
            let message = "cannot get random numbers from the system, which are needed to compare keys";
            Error::Invalid(message.into())
        })?;
        let tags = keys.iter().map(|key| hmac::sign(&secret, key.as_bytes())).collect();
        Ok(Keys { secret, tags })
    }

    pub fn is_empty(&self) -> bool {
        self.tags.is_empty()
    }

    /// The client of a request that has been [admitted](Self::check): the owner of the key, or without keys the other end of the
    /// connection. Without keys, all clients are one tenant. The result for a key stays the same after a restart. Without a
    /// connection, each request is a client of its own.
    pub fn client(&self, headers: &HeaderMap, peer: Option<SocketAddr>) -> Client {
        let number = |of: &str, bytes: &[u8]| {
            let mut context = digest::Context::new(&digest::SHA256);
            context.update(of.as_bytes());
            context.update(bytes);
            let hash = context.finish();
            u128::from_le_bytes(hash.as_ref()[..16].try_into().expect("it is longer"))
        };
        match given_key(headers).filter(|_| !self.is_empty()) {
            Some(key) => {
                let number = number("forebay key", key);
                Client { tenant: Tenant(number), number }
            }
            None => {
                let number = match peer {
                    Some(peer) => number("forebay connection", peer.to_string().as_bytes()),
                    None => {
                        number("forebay request", &REQUESTS.fetch_add(1, Ordering::Relaxed).to_le_bytes())
                    }
                };
                Client { tenant: Tenant::default(), number }
            }
        }
    }

    /// Checks the key of a request, in time that does not depend on how similar a wrong key is.
    ///
    /// # Errors
    /// If the key is missing or wrong.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_empty() {
            return Ok(());
        }
        let Some(given) = given_key(headers) else {
            return Err(refused(
                "the request has no API key: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            ));
        };
        let matches = |tag: &hmac::Tag| hmac::verify(&self.secret, given, tag.as_ref()).is_ok();
        // Every tag is compared, so that the time reveals nothing.
        if self.tags.iter().filter(|tag| matches(tag)).count() > 0 {
            Ok(())
        } else {
            Err(refused("the API key is wrong"))
        }
    }
}

fn refused(message: &str) -> ApiError {
    let status = axum::http::StatusCode::UNAUTHORIZED;
    ApiError { code: Some("invalid_api_key"), ..ApiError::new(status, "authentication_error", message) }
}

fn given_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
        let (scheme, key) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii()))
}

/// The origins whose pages may send requests, in addition to the server's own page.
#[derive(Clone, Debug, Default)]
pub struct Origins(Vec<String>);

impl Origins {
    /// Origins in the form of browsers, such as `https://example.org`; `*` allows all.
    pub fn new(origins: &[String]) -> Origins {
        Origins(origins.iter().map(|origin| origin.trim_end_matches('/').to_ascii_lowercase()).collect())
    }

    /// Checks the origin of a page, and returns the header for its browser.
    ///
    /// # Errors
    /// If the page belongs to another site that is not listed.
    pub fn check(&self, headers: &HeaderMap) -> Result<Option<HeaderValue>, ApiError> {
        let Some(origin) = headers.get(header::ORIGIN) else { return Ok(None) };
        let text = origin.to_str().unwrap_or_default().to_ascii_lowercase();
        if self.0.iter().any(|listed| listed == "*" || *listed == text) {
            return Ok(Some(origin.clone()));
        }
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        if text.split_once("://").is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host)) {
            return Ok(None);
        }
        let message = "this server refuses requests from pages of this origin: start it with ServerOptions::origins ORIGIN to allow them";
        Err(ApiError::new(axum::http::StatusCode::FORBIDDEN, "permission_error", message))
    }
}

/// The host names that requests may use.
///
/// The owner of a site can make its name resolve to an address of this machine (DNS rebinding). Browsers then treat the server as
/// part of that site, and the site's pages can read its answers. The `Host` header still contains the site's name. A server with
/// keys accepts any name, because such a page has no key.
#[derive(Clone, Debug)]
pub enum Hosts {
    Any,
    /// IP addresses, `localhost`, and these names.
    Listed(Vec<String>),
}

impl Hosts {
    /// The hosts of listed origins are accepted names.
    pub fn new(keys: &Keys, origins: &Origins) -> Hosts {
        if !keys.is_empty() || origins.0.iter().any(|origin| origin == "*") {
            return Hosts::Any;
        }
        let hosts = origins.0.iter().filter_map(|origin| Some(host_name(origin.split_once("://")?.1)));
        Hosts::Listed(hosts.map(str::to_owned).collect())
    }

    /// Checks the host names of a request. A request without a name does not come from a browser.
    ///
    /// # Errors
    /// If a name is not accepted.
    pub fn check<'a>(&self, named: impl IntoIterator<Item = &'a [u8]>) -> Result<(), ApiError> {
        let Hosts::Listed(listed) = self else { return Ok(()) };
        let is_ours = |host: &[u8]| {
            let Ok(host) = std::str::from_utf8(host) else { return false };
            let name = host_name(host).to_ascii_lowercase();
            let name = name.strip_suffix('.').unwrap_or(&name);
            name == "localhost"
                || name.ends_with(".localhost")
                || name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok()
                || listed.iter().any(|listed| listed == name)
        };
        if named.into_iter().all(is_ours) {
            return Ok(());
        }
        let message = "this server has no key, so it answers only to IP addresses, localhost and the hosts of \
                       ServerOptions::origins: start it with ServerOptions::origins http://NAME to allow this name, or with \
                       ServerOptions::keys to allow all";
        let error = ApiError::new(axum::http::StatusCode::FORBIDDEN, "permission_error", message);
        Err(ApiError { code: Some("host_not_allowed"), ..error })
    }
}

/// The part before the port.
fn host_name(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => authority,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn any_key_opens_in_either_header() {
        let keys = Keys::new(&["first".into(), "second".into()]).unwrap();
        for key in ["first", "second"] {
            assert!(keys.check(&headers(&[("authorization", &format!("Bearer {key}"))])).is_ok(), "{key}");
            assert!(keys.check(&headers(&[("x-api-key", key)])).is_ok(), "{key}");
        }
        for wrong in [
            vec![],
            vec![("authorization", "Bearer ")],
            vec![("authorization", "Bearer firs")],
            vec![("authorization", "Basic first")],
            vec![("authorization", "first")],
            vec![("x-api-key", "firstx")],
        ] {
            assert_eq!(keys.check(&headers(&wrong)).unwrap_err().status.as_u16(), 401, "{wrong:?}");
        }
        assert!(Keys::new(&[]).unwrap().check(&HeaderMap::new()).is_ok());
        assert!(Keys::new(&[" ".into()]).is_err());
    }

    #[test]
    fn who_has_one_key_is_one_client_and_without_keys_connections_are() {
        let keys = Keys::new(&["first".into(), "second".into()]).unwrap();
        let peers = ["127.0.0.1:1", "127.0.0.1:2"].map(|peer| Some(peer.parse().unwrap()));
        let client = |keys: &Keys, key: &str, peer| {
            keys.client(&headers(&[("authorization", &format!("Bearer {key}"))]), peer)
        };
        let first = client(&keys, "first", peers[0]);
        assert_eq!(client(&keys, "first", peers[1]), first, "on another connection");
        assert_eq!(keys.client(&headers(&[("x-api-key", "first")]), peers[0]), first, "in another header");
        let again = Keys::new(&["first".into()]).unwrap();
        assert_eq!(client(&again, "first", peers[0]), first, "after a restart");
        let second = client(&keys, "second", peers[0]);
        assert!(second.tenant != first.tenant && second.number != first.number);
        let open = Keys::new(&[]).unwrap();
        let [one, other] = peers.map(|peer| client(&open, "first", peer));
        assert_eq!((one.tenant, other.tenant), (Tenant::default(), Tenant::default()));
        assert_ne!(one.number, other.number);
        let [one, other] = [None; 2].map(|nobody| client(&open, "first", nobody));
        assert_ne!(one.number, other.number, "without a connection, each request is a client");
    }

    #[test]
    fn pages_of_others_are_refused_unless_they_are_listed() {
        let check = |listed: &[&str], pairs: &[(&'static str, &str)]| {
            let listed: Vec<_> = listed.iter().map(|&origin| origin.to_owned()).collect();
            Origins::new(&listed).check(&headers(pairs)).map(|allowed| allowed.is_some()).ok()
        };
        let page = [("origin", "https://example.org"), ("host", "127.0.0.1:8080")];
        assert_eq!(check(&[], &[]), Some(false));
        assert_eq!(check(&[], &page), None);
        assert_eq!(check(&["https://Example.org/"], &page), Some(true));
        assert_eq!(check(&["*"], &page), Some(true));
        assert_eq!(
            check(&[], &[("origin", "http://127.0.0.1:8080"), ("host", "127.0.0.1:8080")]),
            Some(false)
        );
        assert_eq!(check(&[], &[("origin", "null"), ("host", "127.0.0.1:8080")]), None);
    }

    #[test]
    fn without_a_key_only_names_of_this_machine_are_answered_to() {
        let hosts = |keys: &[&str], origins: &[&str]| {
            let text = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
            Hosts::new(&Keys::new(&text(keys)).unwrap(), &Origins::new(&text(origins)))
        };
        let open = hosts(&[], &["https://Good.example:444", "http://plain.example"]);
        let ours = [
            "localhost",
            "LOCALHOST:8080",
            "localhost.",
            "a.localhost:1",
            "127.0.0.1",
            "127.0.0.1:8080",
            "192.168.1.7:80",
            "[::1]",
            "[::1]:8080",
            "good.example",
            "good.example:8080",
            "Plain.Example",
        ];
        for name in ours {
            assert!(open.check([name.as_bytes()]).is_ok(), "{name}");
        }
        let others = [
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "notlocalhost",
            "",
            "localhost:8080:evil",
            "good.example.evil.example",
            "127.0.0.1@evil.example",
            "user@localhost",
        ];
        for name in others {
            assert_eq!(open.check([name.as_bytes()]).unwrap_err().status.as_u16(), 403, "{name:?}");
            assert!(open.check([b"localhost".as_slice(), name.as_bytes()]).is_err(), "{name:?}");
            assert!(hosts(&["key"], &[]).check([name.as_bytes()]).is_ok(), "{name:?}");
            assert!(hosts(&[], &["*"]).check([name.as_bytes()]).is_ok(), "{name:?}");
        }
        assert!(open.check([b"\xff".as_slice()]).is_err());
        assert!(open.check([]).is_ok(), "a client of HTTP/1.0 names nobody");
    }
}
