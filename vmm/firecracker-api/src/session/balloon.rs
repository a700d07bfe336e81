//! API calls for the balloon.
//!
//! As in Firecracker, the size of the balloon and the interval of the statistics can change only
//! after the VM starts. The statistics can be enabled or disabled only before the start.

use super::{ApiSession, VmBackend};
use crate::fault::ApiFault;
use crate::http::Response;
use crate::types::{Balloon, BalloonStatsUpdate, BalloonUpdate};

impl<B: VmBackend> ApiSession<B> {
    /// Returns the configuration of the balloon, with the current size and statistics interval.
    pub(super) fn get_balloon(&self) -> Result<Response, ApiFault> {
        self.balloon("GET /balloon").map(Response::json)
    }

    /// Changes the size of the balloon.
    pub(super) fn update_balloon(&mut self, update: BalloonUpdate) -> Result<Response, ApiFault> {
        self.require_start("PATCH /balloon")?;
        let balloon = Balloon {
            amount_mib: update.amount_mib,
            ..self.balloon("PATCH /balloon")?.clone()
        };
        self.backend
            .set_balloon_size(update.amount_mib)
            .map_err(|e| ApiFault::bad(format!("amount_mib: {e}")))?;
        self.resources.replace_balloon(balloon);
        Ok(Response::no_content())
    }

    /// Returns the statistics of the balloon and of the guest's memory.
    pub(super) fn get_balloon_stats(&mut self) -> Result<Response, ApiFault> {
        const CALL: &str = "GET /balloon/statistics";
        self.require_start(CALL)?;
        if self.balloon(CALL)?.stats_polling_interval_s == 0 {
            return Err(ApiFault::bad(format!(
                "{CALL}: statistics were not enabled before the start (stats_polling_interval_s)"
            )));
        }
        let stats = self.backend.balloon_stats();
        let stats = stats.map_err(|e| ApiFault::bad(format!("{CALL}: {e}")))?;
        Ok(Response::json(&stats))
    }

    /// Changes the interval of the balloon's statistics.
    pub(super) fn update_balloon_stats(&mut self, update: BalloonStatsUpdate) -> Result<Response, ApiFault> {
        const CALL: &str = "PATCH /balloon/statistics";
        self.require_start(CALL)?;
        let seconds = update.stats_polling_interval_s;
        let balloon = self.balloon(CALL)?;
        if (seconds == 0) != (balloon.stats_polling_interval_s == 0) {
            return Err(ApiFault::bad(
                "stats_polling_interval_s: statistics cannot be enabled or disabled after the start",
            ));
        }
        let balloon = Balloon {
            stats_polling_interval_s: seconds,
            ..balloon.clone()
        };
        self.backend
            .set_balloon_interval(seconds)
            .map_err(|e| ApiFault::bad(format!("stats_polling_interval_s: {e}")))?;
        self.resources.replace_balloon(balloon);
        Ok(Response::no_content())
    }

    fn balloon(&self, call: &str) -> Result<&Balloon, ApiFault> {
        let balloon = self.resources.balloon();
        balloon.ok_or_else(|| ApiFault::bad(format!("{call}: the VM has no balloon; PUT /balloon adds one")))
    }
}
