//! The metadata service, for control clients.

use std::sync::Arc;

use control_api::protocol::{Failure, FailureKind};
use mmds::service::MetadataService;
use mmds::store::StoreError;

use super::session::fail;

/// Returns the service, or the refusal for a VM without one.
pub(super) fn service(metadata: &Option<Arc<MetadataService>>) -> Result<&MetadataService, Failure> {
    match metadata {
        Some(service) => Ok(service),
        None => fail(
            FailureKind::Unsupported,
            "the VM has no metadata service; start it with --mmds",
        ),
    }
}

/// Returns the refusal of a change.
pub(super) fn refusal(error: StoreError) -> Failure {
    Failure {
        kind: match error {
            StoreError::TooLarge => FailureKind::Limit,
            _ => FailureKind::Invalid,
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
        assert_eq!(none.kind, FailureKind::Unsupported);
        let config = "size-limit=2".parse().unwrap();
        let metadata = Some(Arc::new(MetadataService::new(config)));
        let service = service(&metadata).unwrap();
        let early = service.patch(json!({})).map_err(refusal).unwrap_err();
        assert_eq!(
            (early.kind, early.message.as_str()),
            (FailureKind::Invalid, "The MMDS data store is not initialized.")
        );
        service.put(json!({})).unwrap();
        let large = service.put(json!("abc")).map_err(refusal).unwrap_err();
        assert_eq!(large.kind, FailureKind::Limit);
        assert_eq!(service.get(), json!({}));
    }
}
