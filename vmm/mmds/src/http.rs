//! HTTP/1.1 between the guest and the metadata service.

/// Maximum size of a guest's request, including the body, in bytes.
pub const MAX_REQUEST: usize = 8 << 10;
/// Maximum number of header fields in a guest's request.
const MAX_FIELDS: usize = 64;
/// Name of the header field with the lifetime of a token, in seconds.
const TTL_FIELD: &str = "X-metadata-token-ttl-seconds";
/// Accepted names of the header field with the lifetime of a token: Firecracker's and Amazon EC2's.
const TTL_FIELDS: [&str; 2] = [TTL_FIELD, "X-aws-ec2-metadata-token-ttl-seconds"];
/// Accepted names of the header field with a token: Firecracker's and Amazon EC2's.
const TOKEN_FIELDS: [&str; 2] = ["X-metadata-token", "X-aws-ec2-metadata-token"];
/// Header field that proxies add. A request with this field must not obtain a token.
const FORWARDED_FIELD: &str = "X-Forwarded-For";

/// A parsed request from the guest. The body of the request, if any, is ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetadataRequest {
    /// HTTP method.
    pub method: String,
    /// Path of the requested URL, without scheme and host.
    pub path: String,
    /// `true` if the guest accepts JSON.
    pub accepts_json: bool,
    /// Session token that the guest sent, if any.
    pub token: Option<Vec<u8>>,
    /// Name and value of the header field with the requested lifetime of a token, if present.
    pub ttl: Option<(String, String)>,
    /// `true` if a proxy has forwarded the request.
    pub is_forwarded: bool,
    /// `true` if the connection stays open after the response.
    pub keep_alive: bool,
}

/// A response of the metadata service to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataResponse {
    /// HTTP status code.
    pub status: u16,
    /// `true` if the body is JSON, otherwise it is text.
    pub is_json: bool,
    /// Lifetime in seconds of the token in the body, if the body is a token.
    pub ttl_s: Option<u32>,
    /// Body of the response.
    pub body: String,
}

impl MetadataResponse {
    /// Returns a response with a text body.
    pub fn text(status: u16, body: impl Into<String>) -> Self {
        Self {
            status,
            is_json: false,
            ttl_s: None,
            body: body.into(),
        }
    }

    /// Encodes the response. `keep_alive` is `false` if the connection closes after the response.
    pub fn encode(&self, keep_alive: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            404 => "Not Found",
            405 => "Method Not Allowed",
            413 => "Payload Too Large",
            501 => "Not Implemented",
            _ => "Internal Server Error",
        };
        let kind = if self.is_json {
            "application/json"
        } else {
            "text/plain"
        };
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let (status, length) = (self.status, self.body.len());
        let mut head = format!(
            "HTTP/1.1 {status} {reason}\r\nServer: Perfvisor MMDS\r\nConnection: {connection}\r\n\
             Content-Type: {kind}\r\nContent-Length: {length}\r\n"
        );
        if status == 405 {
            head += "Allow: GET, PUT\r\n";
        }
        if let Some(ttl_s) = self.ttl_s {
            head += &format!("{TTL_FIELD}: {ttl_s}\r\n");
        }
        (head + "\r\n" + &self.body).into_bytes()
    }
}

/// Result of parsing the bytes that a connection has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetadataParseOutcome {
    /// The request is incomplete.
    Incomplete,
    /// A complete request, and its length in bytes.
    Complete(MetadataRequest, usize),
    /// The bytes are not a valid request. The connection closes after this response.
    Rejected(MetadataResponse),
}

/// Parses the first request in `bytes`. A request that would exceed [`MAX_REQUEST`] bytes is
/// rejected.
pub fn parse(bytes: &[u8]) -> MetadataParseOutcome {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let too_large = || {
        let message = format!("The request exceeds {MAX_REQUEST} bytes or {MAX_FIELDS} header fields.");
        MetadataParseOutcome::Rejected(MetadataResponse::text(413, message))
    };
    let bad = |message: String| MetadataParseOutcome::Rejected(MetadataResponse::text(400, message));
    let head_bytes = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() < MAX_REQUEST => {
            return MetadataParseOutcome::Incomplete;
        }
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => return too_large(),
        Err(e) => return bad(format!("Invalid HTTP request: {e}.")),
    };
    let mut length = 0;
    let mut request = MetadataRequest {
        method: head.method.unwrap_or_default().to_owned(),
        path: absolute_path(head.path.unwrap_or_default()).to_owned(),
        keep_alive: head.version == Some(1),
        ..MetadataRequest::default()
    };
    for field in head.headers.iter() {
        let value = field.value.trim_ascii();
        let is = |name: &str| field.name.eq_ignore_ascii_case(name);
        if is("content-length") {
            let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
            let Some(number) = number else {
                return bad("Content-Length must be a number of bytes.".into());
            };
            length = number;
        } else if is("transfer-encoding") {
            return bad("Transfer-Encoding is not supported.".into());
        } else {
            request.read_field(field.name, value);
        }
    }
    let end = head_bytes.saturating_add(length);
    if end > MAX_REQUEST {
        return too_large();
    }
    if bytes.len() < end {
        return MetadataParseOutcome::Incomplete;
    }
    MetadataParseOutcome::Complete(request, end)
}

impl MetadataRequest {
    /// Evaluates a header field of the request. If a token or lifetime is repeated, the first one
    /// is used.
    fn read_field(&mut self, name: &str, value: &[u8]) {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        let text = || String::from_utf8_lossy(value);
        if is("connection") {
            self.keep_alive = match text().to_ascii_lowercase().as_str() {
                "close" => false,
                "keep-alive" => true,
                _ => self.keep_alive,
            };
        } else if is("accept") {
            let is_json = |kind: &str| {
                let kind = kind.split(';').next().unwrap_or_default();
                kind.trim().eq_ignore_ascii_case("application/json")
            };
            self.accepts_json |= text().split(',').any(is_json);
        } else if is(FORWARDED_FIELD) {
            self.is_forwarded = true;
        } else if TOKEN_FIELDS.into_iter().any(is) {
            self.token.get_or_insert_with(|| value.to_vec());
        } else if TTL_FIELDS.into_iter().any(is) {
            self.ttl.get_or_insert_with(|| (name.to_owned(), text().into()));
        }
    }

    /// Returns the error message for a request that a proxy has forwarded.
    pub(crate) fn forwarded_error() -> String {
        format!("Unsupported header name. Key: {FORWARDED_FIELD}")
    }

    /// Returns the error message for a token request that specifies no lifetime.
    pub(crate) fn ttl_error() -> String {
        let [own, aws] = TTL_FIELDS;
        format!(
            "Token time to live value not found. Use `{own}` or `{aws}` header to specify the token's \
             lifetime."
        )
    }

    /// Returns the error message for a request without a session token.
    pub(crate) fn token_error() -> String {
        let [own, aws] = TOKEN_FIELDS;
        format!("No MMDS token provided. Use `{own}` or `{aws}` header to specify the session token.")
    }
}

/// Returns the path of a request target, which may be an absolute URI.
fn absolute_path(target: &str) -> &str {
    match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/"),
        None => target,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn complete(text: &str) -> (MetadataRequest, usize) {
        match parse(text.as_bytes()) {
            MetadataParseOutcome::Complete(request, taken) => (request, taken),
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn header_fields_are_read_in_any_case() {
        let text = "PUT http://169.254.169.254/latest/api/token HTTP/1.1\r\n\
                    ACCEPT: text/plain, application/json;q=1\r\n\
                    x-METADATA-token: a\r\nX-aws-ec2-metadata-token: b\r\n\
                    X-aws-ec2-metadata-token-ttl-seconds: 5\r\nx-forwarded-for: c\r\nContent-Length: 2\r\n\r\n{}GET";
        let (request, taken) = complete(text);
        assert_eq!(taken, text.len() - 3);
        assert_eq!(
            (request.method.as_str(), request.path.as_str()),
            ("PUT", "/latest/api/token")
        );
        assert!(request.accepts_json && request.is_forwarded && request.keep_alive);
        assert_eq!(request.token.as_deref(), Some(&b"a"[..]));
        assert_eq!(request.ttl.unwrap().1, "5");
    }

    #[test]
    fn connection_ends_as_the_client_wants() {
        for (text, keep_alive) in [
            ("GET / HTTP/1.1\r\n\r\n", true),
            ("GET / HTTP/1.0\r\n\r\n", false),
            ("GET / HTTP/1.1\r\nConnection: Close\r\n\r\n", false),
            ("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", true),
        ] {
            assert_eq!(complete(text).0.keep_alive, keep_alive, "{text}");
        }
        assert_eq!(parse(b"GET / HTT"), MetadataParseOutcome::Incomplete);
    }

    #[test]
    fn unacceptable_requests_are_rejected() {
        let long = format!("GET / HTTP/1.1\r\na: {}", "b".repeat(MAX_REQUEST));
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        for (text, status) in [
            ("\x16\x03\x01", 400),
            ("PUT / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("PUT / HTTP/1.1\r\nContent-Length: 9000\r\n\r\n", 413),
            (
                "PUT / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n",
                413,
            ),
            (&long, 413),
            (&many, 413),
        ] {
            match parse(text.as_bytes()) {
                MetadataParseOutcome::Rejected(response) => assert_eq!(response.status, status, "{text}"),
                other => panic!("{text:?}: {other:?}"),
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
            let _ = parse(&[b"GET / HTTP/1.1\r\n", bytes.as_slice()].concat());
        }

        #[test]
        fn parser_decides_at_the_size_limit(bytes in prop::collection::vec(any::<u8>(), MAX_REQUEST)) {
            prop_assert!(parse(&bytes) != MetadataParseOutcome::Incomplete);
        }
    }
}
