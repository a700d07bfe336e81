//! The subset of HTTP/1.1 that the API needs (RFC 9112): requests with a body of known length, and
//! persistent connections.
//!
//! The parser is httparse, which the exporter also uses.

use serde::Serialize;

use crate::fault::ApiFault;

/// Maximum size of a request head, in bytes.
pub const MAX_HEAD: usize = 8 << 10;
/// Default maximum size of a request body, in bytes.
pub const DEFAULT_MAX_BODY: usize = 51_200;
/// Maximum number of header fields in a request.
const MAX_FIELDS: usize = 64;

/// HTTP method of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `GET`, which reads a resource.
    Get,
    /// `PUT`, which creates or replaces a resource.
    Put,
    /// `PATCH`, which updates a resource.
    Patch,
}

impl Method {
    /// Returns the name of the method.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
        }
    }
}

/// A complete HTTP request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// HTTP method.
    pub method: Method,
    /// Path of the request target.
    pub path: String,
    /// Request body; empty if there is none.
    pub body: Vec<u8>,
    /// `true` if the connection stays open after the response.
    pub keep_alive: bool,
}

/// Result of parsing the bytes that a connection has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HttpParseOutcome {
    /// The request is incomplete. The value is `true` if the client waits for an interim response
    /// (`100 Continue`) before it sends the body.
    Incomplete(bool),
    /// A request, and the number of bytes that it occupies at the start of the received bytes.
    Complete(Request, usize),
    /// The bytes are not a valid request. The connection must be closed after the error response.
    Rejected(ApiFault),
}

/// Header fields that determine the length of the body and whether the connection stays open.
struct BodyFields {
    length: usize,
    keep_alive: bool,
    expects_continue: bool,
}

/// Parses the first request in `bytes`, whose body may be at most `max_body` bytes long.
pub fn parse(bytes: &[u8], max_body: usize) -> HttpParseOutcome {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let head_bytes = match head.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= MAX_HEAD => length,
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => {
            return HttpParseOutcome::Incomplete(false);
        }
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            return HttpParseOutcome::Rejected(ApiFault {
                status: 431,
                message: format!("the request head exceeds {MAX_HEAD} bytes or {MAX_FIELDS} fields"),
            });
        }
        Err(e) => return HttpParseOutcome::Rejected(ApiFault::bad(format!("invalid HTTP request: {e}"))),
    };
    let (method, path) = match (head.method, head.path) {
        (Some("GET"), Some(path)) => (Method::Get, path),
        (Some("PUT"), Some(path)) => (Method::Put, path),
        (Some("PATCH"), Some(path)) => (Method::Patch, path),
        (method, _) => {
            let method = method.unwrap_or_default().escape_default();
            let message = format!("method {method}: must be GET, PUT or PATCH");
            return HttpParseOutcome::Rejected(ApiFault::bad(message));
        }
    };
    let body_fields = match body_fields(&head, max_body) {
        Ok(fields) => fields,
        Err(fault) => return HttpParseOutcome::Rejected(fault),
    };
    let end = head_bytes + body_fields.length;
    match bytes.get(head_bytes..end) {
        None => HttpParseOutcome::Incomplete(body_fields.expects_continue),
        Some(body) => {
            let request = Request {
                method,
                path: path.to_owned(),
                body: body.to_vec(),
                keep_alive: body_fields.keep_alive,
            };
            HttpParseOutcome::Complete(request, end)
        }
    }
}

fn body_fields(head: &httparse::Request<'_, '_>, max_body: usize) -> Result<BodyFields, ApiFault> {
    let mut length = None;
    // Firecracker also keeps HTTP/1.0 connections open, and clients of that version depend on this.
    let mut keep_alive = true;
    let mut expects_continue = false;
    for field in head.headers.iter() {
        let value = field.value.trim_ascii();
        if field.name.eq_ignore_ascii_case("content-length") {
            let number = std::str::from_utf8(value)
                .ok()
                .filter(|text| text.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|text| text.parse::<usize>().ok())
                .ok_or_else(|| ApiFault::bad("Content-Length: must be a number of bytes"))?;
            if length.replace(number).is_some_and(|other| other != number) {
                return Err(ApiFault::bad("Content-Length: given twice with different values"));
            }
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(ApiFault::unsupported(
                "Transfer-Encoding",
                "send the body with Content-Length",
            ));
        } else if field.name.eq_ignore_ascii_case("connection") {
            keep_alive = match value {
                _ if value.eq_ignore_ascii_case(b"close") => false,
                _ if value.eq_ignore_ascii_case(b"keep-alive") => true,
                _ => keep_alive,
            };
        } else if field.name.eq_ignore_ascii_case("expect") {
            expects_continue = value.eq_ignore_ascii_case(b"100-continue");
        }
    }
    let length = length.unwrap_or(0);
    if length > max_body {
        return Err(ApiFault {
            status: 413,
            message: format!("the request body has {length} bytes; the maximum is {max_body}"),
        });
    }
    Ok(BodyFields {
        length,
        keep_alive,
        expects_continue,
    })
}

/// Interim response for a client that waits for permission before it sends the body.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// An HTTP response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// HTTP status code.
    pub status: u16,
    /// JSON body; `None` for a response without content.
    pub body: Option<String>,
}

impl Response {
    /// Returns a response without content.
    pub const fn no_content() -> Self {
        Self {
            status: 204,
            body: None,
        }
    }

    /// Returns a response with status 200 and `value` as its body.
    pub fn json(value: &impl Serialize) -> Self {
        match serde_json::to_string(value) {
            Ok(body) => Self {
                status: 200,
                body: Some(body),
            },
            // All types of the API have string keys, and serialize without errors.
            Err(e) => Self {
                status: 500,
                body: Some(format!("{{\"fault_message\":{:?}}}", e.to_string())),
            },
        }
    }

    /// Encodes the response. `keep_alive` is `false` if the connection closes after the response.
    pub fn encode(&self, keep_alive: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            204 => "No Content",
            400 => "Bad Request",
            408 => "Request Timeout",
            413 => "Payload Too Large",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            _ => "Internal Server Error",
        };
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let mut text = format!(
            "HTTP/1.1 {} {reason}\r\nServer: Perfvisor\r\nConnection: {connection}\r\n",
            self.status
        );
        match &self.body {
            Some(body) => {
                let length = body.len();
                text += &format!("Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
            }
            None => text += "\r\n",
        }
        text.into_bytes()
    }
}

impl From<&ApiFault> for Response {
    fn from(fault: &ApiFault) -> Self {
        Self {
            status: fault.status,
            ..Self::json(&fault.body())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn status(text: &str) -> u16 {
        match parse(text.as_bytes(), 100) {
            HttpParseOutcome::Rejected(fault) => fault.status,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn pipelined_requests_are_split() {
        let bytes = b"PUT /x HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}GET / HTTP/1.0\r\n\r\nGET / HTTP/1.1\r\nConnection: close\r\n\r\n";
        let HttpParseOutcome::Complete(put, taken) = parse(bytes, 100) else {
            panic!("incomplete")
        };
        assert_eq!((put.method, put.path.as_str()), (Method::Put, "/x"));
        assert_eq!((put.body.as_slice(), put.keep_alive), (&b"{}"[..], true));
        let HttpParseOutcome::Complete(get, more) = parse(&bytes[taken..], 100) else {
            panic!("incomplete")
        };
        assert_eq!(
            (get.method, get.keep_alive),
            (Method::Get, true),
            "as Firecracker"
        );
        let HttpParseOutcome::Complete(last, _) = parse(&bytes[taken + more..], 100) else {
            panic!("incomplete")
        };
        assert!(!last.keep_alive);
    }

    #[test]
    fn unacceptable_requests_are_rejected() {
        assert_eq!(status("DELETE / HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(status("\x16\x03\x01"), 400);
        assert_eq!(status("PUT / HTTP/1.1\r\nContent-Length: 101\r\n\r\n"), 413);
        assert_eq!(
            status("PUT / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n"),
            400
        );
        assert_eq!(status("PUT / HTTP/1.1\r\nContent-Length: +1\r\n\r\n"), 400);
        assert_eq!(
            status("PUT / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
            400
        );
        assert_eq!(
            status("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"),
            400
        );
        assert_eq!(
            status(&format!("GET / HTTP/1.1\r\na: {}", "b".repeat(MAX_HEAD))),
            431
        );
        assert_eq!(
            status(&format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65))),
            431
        );
    }

    #[test]
    fn client_that_expects_continue_is_recognised() {
        let text = "PUT / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n";
        assert_eq!(parse(text.as_bytes(), 100), HttpParseOutcome::Incomplete(true));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes, 100);
            let _ = parse(&[b"PUT / HTTP/1.1\r\n", bytes.as_slice()].concat(), 100);
        }

        #[test]
        fn parser_decides_at_size_limit(bytes in prop::collection::vec(any::<u8>(), MAX_HEAD..MAX_HEAD + 50)) {
            prop_assert!(!matches!(parse(&bytes, 0), HttpParseOutcome::Incomplete(_)));
        }
    }
}
