//! Metadata service of a VM. Answers the guest's requests and gives the host access to the
//! document.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::Value;

use crate::config::{MmdsConfig, MmdsVersion};
use crate::http::{MetadataRequest, MetadataResponse};
use crate::store::{MetadataStore, MetadataStoreError, MetadataValueFormat};
use crate::token::{MmdsTokenError, MmdsTokenTable};

/// URL path at which the guest requests a session token.
const TOKEN_PATH: &str = "/latest/api/token";

/// The metadata service of a VM, shared by its network devices and its control socket.
#[derive(Debug)]
pub struct MetadataService {
    config: MmdsConfig,
    state: Mutex<ServiceState>,
}

#[derive(Debug)]
struct ServiceState {
    store: MetadataStore,
    tokens: MmdsTokenTable,
}

impl MetadataService {
    /// Creates a service without a document and without tokens.
    pub fn new(config: MmdsConfig) -> Self {
        let state = ServiceState {
            store: MetadataStore::new(config.size_limit),
            tokens: MmdsTokenTable::default(),
        };
        Self {
            config,
            state: Mutex::new(state),
        }
    }

    /// Returns the configuration of the service.
    pub fn config(&self) -> &MmdsConfig {
        &self.config
    }

    fn state(&self) -> MutexGuard<'_, ServiceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the document of the service, or `null` if there is none.
    pub fn get(&self) -> Value {
        self.state().store.get().clone()
    }

    /// Replaces the document of the service.
    ///
    /// # Errors
    /// Returns the errors of [`MetadataStore::put`].
    pub fn put(&self, data: Value) -> Result<(), MetadataStoreError> {
        self.state().store.put(data)
    }

    /// Applies a merge patch to the document of the service.
    ///
    /// # Errors
    /// Returns the errors of [`MetadataStore::patch`].
    pub fn patch(&self, patch: Value) -> Result<(), MetadataStoreError> {
        self.state().store.patch(patch)
    }

    /// Returns the response to a guest request that is handled at time `now`.
    pub fn answer(&self, request: &MetadataRequest, now: Instant) -> MetadataResponse {
        match request.method.as_str() {
            "GET" => self.answer_get(request, now),
            "PUT" => self.answer_put(request, now),
            _ => MetadataResponse::text(405, "Not allowed HTTP method."),
        }
    }

    fn answer_get(&self, request: &MetadataRequest, now: Instant) -> MetadataResponse {
        let state = self.state();
        if self.config.version == MmdsVersion::V2 {
            let Some(token) = &request.token else {
                return MetadataResponse::text(401, MetadataRequest::token_error());
            };
            if !state.tokens.is_valid(token, now) {
                return MetadataResponse::text(401, "MMDS token not valid.");
            }
        }
        let is_json = request.accepts_json && !self.config.imds_compat;
        let format = if is_json {
            MetadataValueFormat::Json
        } else {
            MetadataValueFormat::Imds
        };
        match state.store.read(&request.path, format) {
            Ok(body) => MetadataResponse {
                is_json,
                ..MetadataResponse::text(200, body)
            },
            Err(e @ MetadataStoreError::UnsupportedType) => MetadataResponse::text(501, e.to_string()),
            Err(_) => not_found(request),
        }
    }

    fn answer_put(&self, request: &MetadataRequest, now: Instant) -> MetadataResponse {
        let bad = |message: String| MetadataResponse::text(400, message);
        if request.is_forwarded {
            return bad(MetadataRequest::forwarded_error());
        }
        if !request
            .path
            .split('/')
            .filter(|word| !word.is_empty())
            .eq(TOKEN_PATH.split('/').skip(1))
        {
            return not_found(request);
        }
        let Some((field, ttl)) = &request.ttl else {
            return bad(MetadataRequest::ttl_error());
        };
        let Ok(ttl_s) = ttl.parse() else {
            return bad(format!("Invalid value. Key:{field}; Value:{ttl}"));
        };
        match self.state().tokens.issue(ttl_s, now) {
            Ok(token) => MetadataResponse {
                ttl_s: Some(ttl_s),
                ..MetadataResponse::text(200, token)
            },
            Err(e @ MmdsTokenError::Lifetime(_)) => bad(e.to_string()),
            Err(e @ MmdsTokenError::Random(_)) => MetadataResponse::text(500, e.to_string()),
        }
    }
}

fn not_found(request: &MetadataRequest) -> MetadataResponse {
    MetadataResponse::text(404, format!("Resource not found: {}.", request.path))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    fn service(config: &str) -> MetadataService {
        let service = MetadataService::new(config.parse().unwrap());
        service.put(json!({"a": {"b": "c"}, "n": 1})).unwrap();
        service
    }

    fn request(method: &str, path: &str) -> MetadataRequest {
        MetadataRequest {
            method: method.into(),
            path: path.into(),
            ..MetadataRequest::default()
        }
    }

    fn token_request(ttl: &str) -> MetadataRequest {
        MetadataRequest {
            ttl: Some(("X-metadata-token-ttl-seconds".into(), ttl.into())),
            ..request("PUT", TOKEN_PATH)
        }
    }

    #[test]
    fn version_1_answers_without_and_with_tokens() {
        let service = service("version=v1");
        let now = Instant::now();
        let get = |request: &MetadataRequest| service.answer(request, now);
        assert_eq!(get(&request("GET", "/a/b")), MetadataResponse::text(200, "c"));
        let invalid = MetadataRequest {
            token: Some(b"x".to_vec()),
            accepts_json: true,
            ..request("GET", "/a")
        };
        let answer = get(&invalid);
        assert_eq!(
            (answer.status, answer.is_json, answer.body.as_str()),
            (200, true, r#"{"b":"c"}"#)
        );
        assert_eq!(service.answer(&token_request("60"), now).status, 200);
        assert_eq!(get(&request("GET", "/n")).status, 501);
        let missing = get(&request("GET", "/x"));
        assert_eq!(
            (missing.status, missing.body.as_str()),
            (404, "Resource not found: /x.")
        );
        for method in ["POST", "PATCH", "DELETE", "HEAD"] {
            let refused = get(&request(method, "/a"));
            let text = String::from_utf8(refused.encode(true)).unwrap();
            assert!(
                text.starts_with("HTTP/1.1 405 ") && text.contains("\r\nAllow: GET, PUT\r\n"),
                "{text}"
            );
        }
    }

    #[test]
    fn version_2_requires_a_valid_token() {
        let service = service("version=v2");
        let now = Instant::now();
        let mut get = request("GET", "/a/b");
        let missing = service.answer(&get, now);
        assert!(missing.status == 401 && missing.body.starts_with("No MMDS token provided. Use `X-"));
        get.token = Some(b"x".to_vec());
        assert_eq!(
            service.answer(&get, now),
            MetadataResponse::text(401, "MMDS token not valid.")
        );
        let token = service.answer(&token_request("60"), now);
        assert_eq!((token.status, token.ttl_s), (200, Some(60)));
        get.token = Some(token.body.into_bytes());
        assert_eq!(service.answer(&get, now).body, "c");
        let late = now + Duration::from_secs(60);
        assert_eq!(service.answer(&get, late).status, 401);
    }

    #[test]
    fn token_requests_are_checked() {
        let service = service("version=v2");
        let answer = |request: &MetadataRequest| {
            let answer = service.answer(request, Instant::now());
            (answer.status, answer.body)
        };
        let forwarded = MetadataRequest {
            is_forwarded: true,
            ..token_request("60")
        };
        assert_eq!(answer(&forwarded).0, 400);
        assert!(answer(&forwarded).1.contains("X-Forwarded-For"));
        assert_eq!(answer(&request("PUT", "/a")).0, 404);
        assert!(
            answer(&request("PUT", TOKEN_PATH))
                .1
                .starts_with("Token time to live value not found.")
        );
        for (ttl, said) in [
            ("x", "Invalid value."),
            ("-1", "Invalid value."),
            ("0", "between 1 and 21600"),
            ("21601", "21600"),
        ] {
            let (status, body) = answer(&token_request(ttl));
            assert!(status == 400 && body.contains(said), "{ttl}: {body}");
        }
    }

    #[test]
    fn imds_compatibility_overrides_the_accepted_format() {
        let service = service("imds-compat=on");
        let accepts = MetadataRequest {
            accepts_json: true,
            ..request("GET", "/a")
        };
        assert_eq!(
            service.answer(&accepts, Instant::now()),
            MetadataResponse::text(200, "b")
        );
    }
}
