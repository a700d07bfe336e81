//! As much of HTTP/1.1 as a scrape needs: the head of a GET, and a reply that ends the connection (RFC 9112).

/// Longest head of a request, in bytes.
pub const MAX_HEAD: usize = 8 << 10;
/// Most header fields.
const MAX_FIELDS: usize = 64;
/// The media type of what is served.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// What a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The metrics; without the text if `head_only`.
    Metrics {
        /// The method was HEAD.
        head_only: bool,
    },
    /// Something that is not served.
    Refused(Refusal),
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No HTTP request.
    Malformed,
    /// Nothing is there but `/metrics`.
    NotFound,
    /// Neither GET nor HEAD.
    Method,
    /// Its head is too long.
    TooLarge,
    /// It took too long to come.
    TooSlow,
}

/// Reads a request's head; `None` while it is not all there.
pub fn parse(bytes: &[u8]) -> Option<Request> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD => return None,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Some(Request::Refused(Refusal::TooLarge));
        }
        Err(_) => return Some(Request::Refused(Refusal::Malformed)),
    }
    let (Some(method), Some(target)) = (request.method, request.path) else {
        return Some(Request::Refused(Refusal::Malformed));
    };
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    Some(match (path, method) {
        ("/metrics", "GET") => Request::Metrics { head_only: false },
        ("/metrics", "HEAD") => Request::Metrics { head_only: true },
        ("/metrics", _) => Request::Refused(Refusal::Method),
        _ => Request::Refused(Refusal::NotFound),
    })
}

/// The whole reply that serves `text`.
pub fn metrics(text: &str, head_only: bool) -> Vec<u8> {
    reply("200 OK", OPENMETRICS, "", text, head_only)
}

/// The whole reply of a refusal.
pub fn refusal(why: Refusal) -> Vec<u8> {
    let (status, more, text) = match why {
        Refusal::Malformed => ("400 Bad Request", "", "this is no HTTP request\n"),
        Refusal::NotFound => ("404 Not Found", "", "metrics are at /metrics\n"),
        Refusal::Method => (
            "405 Method Not Allowed",
            "Allow: GET, HEAD\r\n",
            "metrics can be read with GET\n",
        ),
        Refusal::TooLarge => (
            "431 Request Header Fields Too Large",
            "",
            "the request's head is longer than 8 KiB or has more than 64 fields\n",
        ),
        Refusal::TooSlow => ("408 Request Timeout", "", "the request took too long to come\n"),
    };
    reply(status, TEXT, more, text, false)
}

fn reply(status: &str, kind: &str, more: &str, text: &str, head_only: bool) -> Vec<u8> {
    let mut out = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{more}Connection: close\r\n\r\n",
        text.len()
    )
    .into_bytes();
    if !head_only {
        out.extend_from_slice(text.as_bytes());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_are_told_apart() {
        let get = Request::Metrics { head_only: false };
        for (text, request) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Some(get)),
            ("GET /metrics?name[]=a HTTP/1.0\r\n\r\n", Some(get)),
            (
                "HEAD /metrics HTTP/1.1\r\n\r\n",
                Some(Request::Metrics { head_only: true }),
            ),
            (
                "POST /metrics HTTP/1.1\r\n\r\n",
                Some(Request::Refused(Refusal::Method)),
            ),
            (
                "GET / HTTP/1.1\r\n\r\n",
                Some(Request::Refused(Refusal::NotFound)),
            ),
            (
                "GET /metrics/../x HTTP/1.1\r\n\r\n",
                Some(Request::Refused(Refusal::NotFound)),
            ),
            ("\x16\x03\x01", Some(Request::Refused(Refusal::Malformed))),
            ("GET /metrics\r\n\r\n", Some(Request::Refused(Refusal::Malformed))),
            ("GET /metrics HTTP/1.1\r\nHo", None),
            ("", None),
        ] {
            assert_eq!(parse(text.as_bytes()), request, "{text:?}");
        }
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(65));
        let long = format!("GET /metrics HTTP/1.1\r\na: {}", "b".repeat(MAX_HEAD));
        for text in [many, long] {
            assert_eq!(parse(text.as_bytes()), Some(Request::Refused(Refusal::TooLarge)));
        }
    }

    #[test]
    fn replies_say_how_long_they_are() {
        let whole = String::from_utf8(metrics("a 1\n# EOF\n", false)).unwrap();
        let (head, body) = whole.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("Content-Length: 10") && head.contains("version=1.0.0"));
        assert_eq!(body, "a 1\n# EOF\n");
        let head_only = String::from_utf8(metrics("a 1\n# EOF\n", true)).unwrap();
        assert!(head_only.contains("Content-Length: 10") && head_only.ends_with("\r\n\r\n"));
        assert!(
            String::from_utf8(refusal(Refusal::Method))
                .unwrap()
                .contains("Allow: GET")
        );
    }

    proptest! {
        /// Whatever comes, there is a decision once the bound is reached.
        #[test]
        fn no_bytes_keep_a_connection_open(bytes in prop::collection::vec(any::<u8>(), MAX_HEAD..MAX_HEAD + 50)) {
            prop_assert!(parse(&bytes).is_some());
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes);
            let _ = parse(&[b"GET /metrics HTTP/1.1\r\n", bytes.as_slice()].concat());
        }
    }
}
