//! The metadata service, for control clients.

use std::sync::Arc;

use control_api::protocol::{RequestError, RequestErrorKind};
use mmds::service::MetadataService;
use mmds::store::MetadataStoreError;
use serde_json::Value;

use super::session::fail;

/// Returns the metadata service of the VM, or a [`RequestError`] if there is none.
pub(super) fn service(metadata: &Option<Arc<MetadataService>>) -> Result<&MetadataService, RequestError> {
    match metadata {
        Some(service) => Ok(service),
        None => fail(
            RequestErrorKind::Unsupported,
            "the VM has no metadata service; start it with --mmds",
        ),
    }
}

/// Replaces the metadata with `data`.
pub(super) fn put(metadata: &Option<Arc<MetadataService>>, data: Value) -> Result<(), RequestError> {
    service(metadata)?.put(data).map_err(refusal)
}

/// Merges `data` into the metadata.
pub(super) fn patch(metadata: &Option<Arc<MetadataService>>, data: Value) -> Result<(), RequestError> {
    service(metadata)?.patch(data).map_err(refusal)
}

/// Converts the error of a rejected change of the metadata to the error that the client receives.
fn refusal(error: MetadataStoreError) -> RequestError {
    RequestError {
        kind: match error {
            MetadataStoreError::TooLarge => RequestErrorKind::Limit,
            _ => RequestErrorKind::Invalid,
        },
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn changes_are_refused_with_their_kind() {
        let none = service(&None).unwrap_err();
        assert_eq!(none.kind, RequestErrorKind::Unsupported);
        let config = "size-limit=2".parse().unwrap();
        let metadata = Some(Arc::new(MetadataService::new(config)));
        let service = service(&metadata).unwrap();
        let early = service.patch(json!({})).map_err(refusal).unwrap_err();
        assert_eq!(
            (early.kind, early.message.as_str()),
            (
                RequestErrorKind::Invalid,
                "The MMDS data store is not initialized."
            )
        );
        service.put(json!({})).unwrap();
        let large = service.put(json!("abc")).map_err(refusal).unwrap_err();
        assert_eq!(large.kind, RequestErrorKind::Limit);
        assert_eq!(service.get(), json!({}));
    }
}
