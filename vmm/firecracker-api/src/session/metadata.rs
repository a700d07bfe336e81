//! The document of the metadata service, before and after the start.
//!
//! Once a VM with a metadata service runs, the VM has the document. Otherwise this process has it.

use mmds::config::MAX_SIZE_LIMIT;
use mmds::store::{StoreError, check_data};
use serde_json::Value;

use super::{Session, VmBackend};
use crate::fault::Fault;
use crate::http::Response;
use crate::resources::Resources;
use crate::types::InstanceState;

impl<B: VmBackend> Session<B> {
    /// Returns the document.
    pub(super) fn get_metadata(&mut self) -> Result<Response, Fault> {
        let data = if self.vm_has_metadata() {
            self.backend.metadata()?
        } else {
            self.metadata.get().clone()
        };
        Ok(Response::json(&data))
    }

    /// Replaces the document.
    pub(super) fn put_metadata(&mut self, data: Value) -> Result<Response, Fault> {
        if self.vm_has_metadata() {
            check_data(&data, self.metadata_limit).map_err(refusal)?;
            self.backend.put_metadata(data)?;
        } else {
            self.metadata.put(data).map_err(refusal)?;
        }
        Ok(Response::no_content())
    }

    /// Applies a merge patch to the document.
    pub(super) fn patch_metadata(&mut self, patch: Value) -> Result<Response, Fault> {
        if self.vm_has_metadata() {
            // The VM would close a connection with a request that it cannot read.
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

    /// Returns the document for a VM that starts with `resources`.
    pub(super) fn metadata_at_start(&self, resources: &Resources) -> Option<Value> {
        let is_needed = resources.mmds().is_some() && self.metadata.is_initialized();
        is_needed.then(|| self.metadata.get().clone())
    }

    /// Adds the option for the metadata service.
    pub(super) fn with_mmds(&self, resources: &Resources, mut options: Vec<String>) -> Vec<String> {
        options.extend(resources.mmds_option(self.metadata_limit));
        options
    }
}

/// Returns the fault of a change that the store refused.
fn refusal(error: StoreError) -> Fault {
    let status = match error {
        StoreError::TooLarge => 413,
        _ => 400,
    };
    Fault {
        status,
        message: error.to_string(),
    }
}
