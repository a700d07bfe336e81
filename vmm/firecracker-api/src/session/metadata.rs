//! API calls for the document of the metadata service, before and after the VM starts.
//!
//! Once a VM with a metadata service is running, the VM holds the document. Otherwise, this process
//! (the API server) holds it.

use mmds::config::MAX_SIZE_LIMIT;
use mmds::store::{MetadataStoreError, check_data};
use serde_json::Value;

use super::{ApiSession, VmBackend};
use crate::fault::ApiFault;
use crate::http::Response;
use crate::resources::VmResources;
use crate::types::InstanceState;

impl<B: VmBackend> ApiSession<B> {
    /// Returns the document of the metadata service.
    pub(super) fn get_metadata(&mut self) -> Result<Response, ApiFault> {
        let data = if self.vm_has_metadata() {
            self.backend.metadata()?
        } else {
            self.metadata.get().clone()
        };
        Ok(Response::json(&data))
    }

    /// Replaces the document of the metadata service.
    pub(super) fn put_metadata(&mut self, data: Value) -> Result<Response, ApiFault> {
        if self.vm_has_metadata() {
            check_data(&data, self.metadata_limit).map_err(refusal)?;
            self.backend.put_metadata(data)?;
        } else {
            self.metadata.put(data).map_err(refusal)?;
        }
        Ok(Response::no_content())
    }

    /// Applies a merge patch to the document of the metadata service.
    pub(super) fn patch_metadata(&mut self, patch: Value) -> Result<Response, ApiFault> {
        if self.vm_has_metadata() {
            // Check the patch first, because the VM would close the connection if it could not
            // parse the request.
            check_data(&patch, MAX_SIZE_LIMIT).map_err(refusal)?;
            self.backend.patch_metadata(patch)?;
        } else {
            self.metadata.patch(patch).map_err(refusal)?;
        }
        Ok(Response::no_content())
    }

    fn vm_has_metadata(&self) -> bool {
        self.state != InstanceState::NotStarted && self.resources.mmds().is_some()
    }

    /// Returns the document that a VM receives when it is started with `resources`. Returns `None`
    /// if the VM has no metadata service or no document has been set.
    pub(super) fn metadata_at_start(&self, resources: &VmResources) -> Option<Value> {
        let is_needed = resources.mmds().is_some() && self.metadata.is_initialized();
        is_needed.then(|| self.metadata.get().clone())
    }

    /// Appends the option for the metadata service, if `resources` contains one, to options of
    /// `perfvisor run`.
    pub(super) fn with_mmds(&self, resources: &VmResources, mut options: Vec<String>) -> Vec<String> {
        options.extend(resources.mmds_option(self.metadata_limit));
        options
    }
}

/// Converts the error of a rejected document or patch to the error of the API call.
fn refusal(error: MetadataStoreError) -> ApiFault {
    let status = match error {
        MetadataStoreError::TooLarge => 413,
        _ => 400,
    };
    ApiFault {
        status,
        message: error.to_string(),
    }
}
