//! `perfvisor ctl NAME limits`: shows the rate limiters of a VM's devices.

use std::fmt::Write as _;

use control_api::rate_limit::{RateLimiterInfo, TokenBucketLimit};

/// Formats the rate limiters of a VM as a table. Limits have the syntax of `perfvisor run --disk`.
pub(super) fn limits_text(limiters: &[RateLimiterInfo]) -> String {
    let mut text = String::new();
    let mut row = |cells: [&str; 4]| {
        let [name, bandwidth, ops, throttled] = cells;
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<10} {bandwidth:<26} {ops:<26} {throttled:>10}");
    };
    row(["LIMITER", "BANDWIDTH", "OPS", "THROTTLED"]);
    for limiter in limiters {
        row([
            &limiter.name,
            &limit_text(limiter.bandwidth),
            &limit_text(limiter.ops),
            &limiter.throttled.to_string(),
        ]);
    }
    text
}

fn limit_text(limit: Option<TokenBucketLimit>) -> String {
    let Some(limit) = limit else {
        return "-".to_owned();
    };
    let text = format!("{}/{}", limit.size, limit.refill_ms);
    match limit.one_time_burst {
        0 => text,
        burst => format!("{text}+{burst}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_shown_as_options() {
        let limit = |one_time_burst| TokenBucketLimit {
            size: 1000,
            one_time_burst,
            refill_ms: 100,
        };
        let disk = RateLimiterInfo {
            name: "disk0".into(),
            bandwidth: Some(limit(50)),
            ops: None,
            throttled: 7,
        };
        let text = limits_text(&[disk]);
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let rows: Vec<_> = text.lines().map(cells).collect();
        assert_eq!(rows[0], ["LIMITER", "BANDWIDTH", "OPS", "THROTTLED"]);
        assert_eq!(rows[1], ["disk0", "1000/100+50", "-", "7"]);
        assert_eq!(limit_text(Some(limit(0))), "1000/100");
    }
}
