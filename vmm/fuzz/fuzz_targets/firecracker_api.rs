//! Fuzzes the Firecracker API: the HTTP parser, request bodies, and the sequence of calls that a
//! session makes to its VM. Every option passed to the VM must be a valid program argument.
#![no_main]

use firecracker_api::fault::ApiFault;
use firecracker_api::http::{HttpParseOutcome, parse};
use firecracker_api::resources::RateLimiterChange;
use firecracker_api::session::{ApiSession, VmBackend};
use firecracker_api::types::{BalloonStats, Logger, Metrics, VmConfig};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// VM back end of the API session. Every call succeeds.
struct Accepting;

impl VmBackend for Accepting {
    fn check_options(&mut self, options: &[String]) -> Result<(), String> {
        // Each element of `options` becomes a program argument.
        assert!(options.iter().all(|option| option.starts_with("--") && !option.contains('\0')));
        Ok(())
    }

    fn check_file(&mut self, _: &str) -> Result<(), String> {
        Ok(())
    }

    fn set_logger(&mut self, _: &Logger) -> Result<(), String> {
        Ok(())
    }

    fn set_metrics(&mut self, _: &Metrics) -> Result<(), String> {
        Ok(())
    }

    fn start(&mut self, options: &[String], _: Option<&Value>) -> Result<(), String> {
        self.check_options(options)
    }

    fn put_metadata(&mut self, _: Value) -> Result<(), ApiFault> {
        Ok(())
    }

    fn patch_metadata(&mut self, _: Value) -> Result<(), ApiFault> {
        Ok(())
    }

    fn metadata(&mut self) -> Result<Value, ApiFault> {
        Ok(Value::Null)
    }

    fn pause(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn resume(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn press_power_button(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn change_limiter(&mut self, _: &RateLimiterChange) -> Result<(), String> {
        Ok(())
    }

    fn save(&mut self, _: &str, _: &str, _: &VmConfig) -> Result<(), String> {
        Ok(())
    }

    fn read_snapshot(&mut self, _: &str) -> Result<VmConfig, String> {
        Ok(VmConfig::default())
    }

    fn set_balloon_size(&mut self, _: u32) -> Result<(), String> {
        Ok(())
    }

    fn set_balloon_interval(&mut self, _: u16) -> Result<(), String> {
        Ok(())
    }

    fn balloon_stats(&mut self) -> Result<BalloonStats, String> {
        Ok(BalloonStats::default())
    }

    fn flush_metrics(&mut self) -> Result<(), String> {
        Ok(())
    }
}

fuzz_target!(|data: &[u8]| {
    let mut session = ApiSession::new(Accepting, "fuzz".into(), "0".into());
    let mut rest = data;
    while let HttpParseOutcome::Complete(request, taken) = parse(rest, 51_200) {
        let response = session.answer(&request);
        assert!(matches!(response.status, 200 | 204 | 400));
        rest = &rest[taken..];
    }
});
