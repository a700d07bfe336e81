//! The subset of HTTP/1.1 (RFC 9112) that scrapes need: the head of a GET or HEAD request, and a
//! reply after which the connection closes.
//!
//! The parser is httparse, which hyper also uses. Server libraries were rejected because tiny_http
//! 0.12 has no timeout for silent clients and hyper needs an asynchronous runtime.

use std::sync::Arc;

use form_urlencoded::parse as parse_form;

/// Maximum size of a request head, in bytes.
pub const MAX_HEAD: usize = 8 << 10;
/// Maximum number of header fields in a request.
const MAX_FIELDS: usize = 64;
/// Maximum number of query parameters in a request.
const MAX_PARAMETERS: usize = 16;
/// Maximum length of the host name in a request, in bytes.
const MAX_HOST: usize = 255;

/// Media type of the metrics.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Media type of plain-text replies.
pub const TEXT: &str = "text/plain; charset=utf-8";

/// The `Host` field of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostHeader {
    /// The field is missing.
    Absent,
    /// The field is duplicate or malformed.
    Invalid,
    /// The value of the `Host` field.
    Named(String),
}

/// The parsed head of an HTTP request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpRequest {
    /// `true` for a HEAD request, whose reply needs no body.
    pub head_only: bool,
    /// Path of the request target, without the query.
    pub path: String,
    /// Query parameters, as names and values.
    pub parameters: Vec<(String, String)>,
    /// The `Host` field.
    pub host: HostHeader,
    /// Token of `Authorization: Bearer TOKEN` (RFC 6750).
    pub bearer: Option<String>,
}

impl HttpRequest {
    /// Returns the value of a query parameter.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        let found = self.parameters.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// Parses the head of a request. Returns `None` if the head is incomplete.
pub fn parse(bytes: &[u8]) -> Option<Result<HttpRequest, HttpReply>> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    let too_long = || {
        HttpReply::refusal(
            431,
            "the request's head is longer than 8 KiB or has more than 64 fields",
        )
    };
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => return Some(Err(too_long())),
        Err(_) => return Some(Err(HttpReply::refusal(400, "this is no HTTP request"))),
    }
    let (Some(method), Some(target)) = (request.method, request.path) else {
        return Some(Err(HttpReply::refusal(400, "this is no HTTP request")));
    };
    if !matches!(method, "GET" | "HEAD") {
        return Some(Err(HttpReply::refusal(405, "all that is here is read with GET")));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let fields = || request.headers.iter();
    let bearer = fields()
        .find(|field| field.name.eq_ignore_ascii_case("authorization"))
        .and_then(|field| std::str::from_utf8(field.value).ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, token)| token.trim().to_owned());
    let mut hosts = fields().filter(|field| field.name.eq_ignore_ascii_case("host"));
    let host = match (hosts.next(), hosts.next()) {
        (None, _) => HostHeader::Absent,
        (Some(field), None) => match std::str::from_utf8(field.value) {
            Ok(host) if is_host(host) => HostHeader::Named(host.to_owned()),
            _ => HostHeader::Invalid,
        },
        (Some(_), Some(_)) => HostHeader::Invalid,
    };
    let parameters = parse_form(query.as_bytes()).take(MAX_PARAMETERS);
    Some(Ok(HttpRequest {
        head_only: method == "HEAD",
        path: path.to_owned(),
        parameters: parameters
            .map(|(key, value)| (key.into_owned(), value.into_owned()))
            .collect(),
        host,
        bearer,
    }))
}

fn is_host(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b".:-_[]".contains(&b);
    (1..=MAX_HOST).contains(&text.len()) && text.bytes().all(allowed)
}

/// An HTTP reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpReply {
    /// HTTP status code.
    pub status: u16,
    /// Media type of the body.
    pub kind: &'static str,
    /// Body, which may be shared by several replies.
    pub body: Arc<Vec<u8>>,
    /// Value of `Retry-After`, in seconds.
    pub retry_after: Option<u32>,
}

impl HttpReply {
    /// Returns a reply with status 200.
    pub fn ok(kind: &'static str, body: impl Into<Arc<Vec<u8>>>) -> Self {
        Self {
            status: 200,
            kind,
            body: body.into(),
            retry_after: None,
        }
    }

    /// Returns an error reply with a one-line reason.
    pub fn refusal(status: u16, why: &str) -> Self {
        Self {
            status,
            kind: TEXT,
            body: format!("{why}\n").into_bytes().into(),
            retry_after: None,
        }
    }

    /// Sets `Retry-After`, in seconds.
    #[must_use]
    pub fn with_retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// Returns the head of the reply.
    pub fn head(&self) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            421 => "Misdirected Request",
            431 => "Request Header Fields Too Large",
            502 => "Bad Gateway",
            503 => "Service Unavailable",
            504 => "Gateway Timeout",
            _ => "Internal Server Error",
        };
        let mut more = String::new();
        if self.status == 405 {
            more.push_str("Allow: GET, HEAD\r\n");
        }
        if self.status == 401 {
            more.push_str("WWW-Authenticate: Bearer\r\n");
        }
        if let Some(seconds) = self.retry_after {
            more.push_str(&format!("Retry-After: {seconds}\r\n"));
        }
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{more}Connection: close\r\n\r\n",
            self.status,
            self.kind,
            self.body.len()
        )
        .into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn get(target: &str) -> HttpRequest {
        let text = format!("GET {target} HTTP/1.1\r\nhost: h-1.example:9465\r\n\r\n");
        parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn parameters_are_decoded() {
        let request = get("/debug/pprof/profile?vm=a%40b&seconds=5&event=cycles%3Au&x");
        assert_eq!(request.path, "/debug/pprof/profile");
        assert_eq!(request.parameter("vm"), Some("a@b"));
        assert_eq!(request.parameter("seconds"), Some("5"));
        assert_eq!(request.parameter("event"), Some("cycles:u"));
        assert_eq!((request.parameter("x"), request.parameter("y")), (Some(""), None));
        assert_eq!(request.host, HostHeader::Named("h-1.example:9465".into()));
        assert!(!request.head_only && get("/metrics").parameters.is_empty());
    }

    #[test]
    fn malformed_http_requests_are_rejected() {
        let status = |text: &str| parse(text.as_bytes()).map(|parsed| parsed.map_err(|reply| reply.status));
        for (text, refused) in [
            ("POST /metrics HTTP/1.1\r\n\r\n", 405),
            ("\x16\x03\x01", 400),
            ("GET /metrics\r\n\r\n", 400),
            (&format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65)), 431),
            (&format!("GET / HTTP/1.1\r\na: {}", "b".repeat(MAX_HEAD)), 431),
        ] {
            assert_eq!(status(text), Some(Err(refused)), "{text:?}");
        }
        assert_eq!(status("GET /metrics HTTP/1.1\r\nHo"), None);
        let host = |fields: &str| {
            let text = format!("GET / HTTP/1.1\r\n{fields}\r\n");
            parse(text.as_bytes()).unwrap().unwrap().host
        };
        assert_eq!(host("Host: a\"b\r\n"), HostHeader::Invalid);
        assert_eq!(host("Host: a\r\nhost: a\r\n"), HostHeader::Invalid);
        assert_eq!(host(""), HostHeader::Absent);
    }

    #[test]
    fn bearer_token_is_read() {
        let bearer = |value: &str| {
            let text = format!("GET / HTTP/1.1\r\nAuthorization: {value}\r\n\r\n");
            parse(text.as_bytes()).unwrap().unwrap().bearer
        };
        assert_eq!(bearer("Bearer abc.def"), Some("abc.def".into()));
        assert_eq!(bearer("bearer  abc"), Some("abc".into()));
        assert_eq!(bearer("Basic abc"), None);
        assert_eq!(bearer("abc"), None);
    }

    #[test]
    fn replies_have_content_length() {
        let head = |reply: &HttpReply| String::from_utf8(reply.head()).unwrap();
        let ok = HttpReply::ok(TEXT, b"ok\n".to_vec());
        assert!(head(&ok).starts_with("HTTP/1.1 200 OK\r\n") && head(&ok).ends_with("\r\n\r\n"));
        assert!(head(&ok).contains("Content-Length: 3\r\n") && *ok.body == b"ok\n");
        let busy = head(&HttpReply::refusal(503, "busy").with_retry_after(7));
        assert!(busy.contains("503 Service Unavailable") && busy.contains("Retry-After: 7\r\n"));
        assert!(head(&HttpReply::refusal(405, "no")).contains("Allow: GET"));
        assert!(head(&HttpReply::refusal(401, "no")).contains("WWW-Authenticate: Bearer"));
    }

    proptest! {
        /// For any input of maximum size, the parser returns a request or an error without waiting
        /// for more input.
        #[test]
        fn parser_decides_at_size_limit(bytes in prop::collection::vec(any::<u8>(), MAX_HEAD..MAX_HEAD + 50)) {
            prop_assert!(parse(&bytes).is_some());
        }

        #[test]
        fn parser_survives_random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let _ = parse(&[b"GET /?", bytes.as_slice(), b" HTTP/1.1\r\n\r\n"].concat());
        }
    }
}
