//! Output of events to their own ring or to the ring of another event.
//!
//! The code of this module is not performance-critical and runs under the topology lock. The hot
//! path uses the pointer [`crate::model::event::Event::output`], which this module updates when a
//! ring is attached or an output is redirected.

use std::sync::Arc;

use crate::lock::LockGuard;
use crate::model::output::Output;
use crate::service::error::PerfEventControlError;
use crate::service::open_events::{EventRef, OutputState};

impl EventRef {
    pub fn output_state(&self) -> LockGuard<'_, OutputState> {
        self.links.output.lock()
    }

    /// Checks that other events may write to the ring of this event. The caller must hold the
    /// topology lock.
    pub fn can_be_output(&self) -> Result<(), PerfEventControlError> {
        if self.output_state().redirect.is_some() {
            return Err(PerfEventControlError::Invalid(
                "the target writes to another event itself",
            ));
        }
        if self.cell.lock().get(self.key, &self.shared).is_none() {
            return Err(PerfEventControlError::Closed);
        }
        Ok(())
    }

    /// Returns the event's own ring, if it has one.
    pub fn own_output(&self) -> Option<Arc<Output>> {
        self.output_state().own.clone()
    }

    /// Records that the output of this new event was redirected to the ring of `target` when the
    /// event was opened.
    pub fn record_redirect(&self, target: &Self) {
        self.output_state().redirect = Some(target.clone());
        target.output_state().sources.push(self.clone());
    }

    /// Updates the ring pointers in the contexts: those of this event, of its children, and of the
    /// events that are redirected to this one.
    pub fn propagate_output(&self) {
        let (output, sources) = {
            let state = self.output_state();
            let redirected = state
                .redirect
                .as_ref()
                .and_then(|target| target.output_state().own.clone());
            (redirected.or_else(|| state.own.clone()), state.sources.clone())
        };
        for event in std::iter::once(self).chain(&sources) {
            let _ = event.for_each(|context, key, now_ns| {
                context.events[key].output = output.clone();
                context.update_page(key, now_ns);
            });
        }
    }

    /// Detaches a closed event from its output. Other events that write to its ring continue to do
    /// so and keep the ring alive.
    pub fn release_output(&self) {
        let (redirect, _ring) = {
            let mut state = self.output_state();
            state.closed = true;
            state.mappings = 0;
            (state.redirect.take(), state.take_unused())
        };
        if let Some(target) = redirect {
            target.remove_source(self);
        }
    }

    /// Removes `source` from the list of events that are redirected to this event's ring.
    fn remove_source(&self, source: &Self) {
        let _ring = {
            let mut state = self.output_state();
            state.sources.retain(|s| !Arc::ptr_eq(&s.shared, &source.shared));
            state.take_unused()
        };
    }

    /// Redirects the event's output to the ring of `target`, or back to its own ring. The caller
    /// must hold the topology lock.
    pub fn set_output(&self, target: Option<&Self>) -> Result<(), PerfEventControlError> {
        if let Some(target) = target {
            if Arc::ptr_eq(&self.shared, &target.shared) {
                return Err(PerfEventControlError::Invalid(
                    "an event cannot be its own output",
                ));
            }
            target.can_be_output()?;
            let state = self.output_state();
            if state.own.is_some() {
                return Err(PerfEventControlError::Invalid("the event has a ring of its own"));
            }
            if !state.sources.is_empty() {
                return Err(PerfEventControlError::Invalid("other events write to this one"));
            }
        }
        let old = std::mem::replace(&mut self.output_state().redirect, target.cloned());
        if let Some(old) = old {
            old.remove_source(self);
        }
        if let Some(target) = target {
            target.output_state().sources.push(self.clone());
        }
        self.propagate_output();
        Ok(())
    }
}
