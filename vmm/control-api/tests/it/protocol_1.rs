//! Pins version 1 of the control protocol line by line.
//!
//! Other programs send and expect these lines. Changing one changes the protocol and requires a new
//! version, unless the change only adds optional fields.

use control_api::protocol::{
    BranchStacks, Call, GuestCode, PROTOCOL, ReplyLine, RequestError, RequestErrorKind, RequestLine,
    SamplingParams,
};
use control_api::rate_limit::TokenBucketLimit;
use control_api::request::{self, Request};
use perf_core::SharePolicy;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Checks that `request` with ID 7 serializes to an object with `fields` after the ID, and that
/// parsing this object returns the request.
#[track_caller]
fn asks(request: impl Into<Call>, fields: &str) {
    let call = request.into();
    let line = format!("{{\"id\":7,{fields}}}");
    let request = RequestLine {
        id: 7,
        call: call.clone(),
    };
    assert_eq!(serde_json::to_string(&request).unwrap(), line);
    let understood: RequestLine = serde_json::from_str(&line).unwrap();
    assert_eq!((understood.id, understood.call), (7, call));
}

/// Checks that `json` round-trips through the reply type.
#[track_caller]
fn answers<R: Request>(json: &str)
where
    R::Reply: Serialize,
{
    same::<R::Reply>(json);
}

#[track_caller]
fn same<T: Serialize + DeserializeOwned>(json: &str) {
    let value: T = serde_json::from_str(json).unwrap();
    let again: Value = serde_json::to_value(&value).unwrap();
    assert_eq!(again, serde_json::from_str::<Value>(json).unwrap());
}

#[test]
fn version_is_1() {
    assert_eq!(PROTOCOL, 1);
}

#[test]
fn balloon_matches_version_1() {
    answers::<request::Balloon>(
        r#"{"target_bytes":1048576,"actual_bytes":0,"released_bytes":4096,"deflate_on_oom":true,
            "free_page_reporting":false,"statistics_interval_s":0}"#,
    );
    answers::<request::BalloonStatistics>(
        r#"{"target_bytes":0,"actual_bytes":0,"released_bytes":0,"deflate_on_oom":false,
            "free_page_reporting":true,"statistics_interval_s":5,
            "statistics":{"swap_in":1,"swap_out":2,"major_faults":3,"minor_faults":4,"free_memory":5,
            "total_memory":6,"available_memory":7,"disk_caches":8,"hugetlb_allocations":9,
            "hugetlb_failures":10,"oom_kill":11,"alloc_stall":12,"async_scan":13,"direct_scan":14,
            "async_reclaim":15,"direct_reclaim":16}}"#,
    );
}

#[test]
fn requests_match_version_1() {
    asks(request::Hello { protocol: 1 }, r#""call":"hello","protocol":1"#);
    asks(request::Status, r#""call":"status""#);
    asks(request::Pause, r#""call":"pause""#);
    asks(request::Resume, r#""call":"resume""#);
    asks(request::Stop, r#""call":"stop""#);
    asks(request::Powerdown, r#""call":"powerdown""#);
    for (policy, name) in [
        (SharePolicy::GuestFirst, "guest-first"),
        (SharePolicy::OperatorFirst, "operator-first"),
        (SharePolicy::Strict, "strict"),
    ] {
        asks(
            request::Share { policy },
            &format!(r#""call":"share","policy":"{name}""#),
        );
        assert_eq!(name.parse(), Ok(policy));
    }
    asks(
        request::Balloon { size_mib: 256 },
        r#""call":"balloon","size_mib":256"#,
    );
    asks(
        request::BalloonStatistics { interval_s: 5 },
        r#""call":"balloon_statistics","interval_s":5"#,
    );
    let toml = "mode = \"allow\"".to_owned();
    asks(
        request::Filter { toml },
        r#""call":"filter","toml":"mode = \"allow\"""#,
    );
    let data = serde_json::json!({"a": null, "b": [1]});
    asks(
        request::MmdsPut { data: data.clone() },
        r#""call":"mmds_put","data":{"a":null,"b":[1]}"#,
    );
    asks(
        request::MmdsPatch { data },
        r#""call":"mmds_patch","data":{"a":null,"b":[1]}"#,
    );
    asks(request::MmdsGet, r#""call":"mmds_get""#);
    asks(request::RateLimiters, r#""call":"rate_limiters""#);
    let limit = |one_time_burst| TokenBucketLimit {
        size: 10,
        one_time_burst,
        refill_ms: 1000,
    };
    asks(
        request::RateLimit {
            name: "disk0".into(),
            bandwidth: None,
            ops: Some(limit(0)),
        },
        r#""call":"rate_limit","name":"disk0","ops":{"size":10,"refill_ms":1000}"#,
    );
    asks(
        request::RateLimit {
            name: "net0-rx".into(),
            bandwidth: Some(limit(5)),
            ops: None,
        },
        r#""call":"rate_limit","name":"net0-rx","bandwidth":{"size":10,"one_time_burst":5,"refill_ms":1000}"#,
    );
    asks(request::Enable, r#""call":"enable""#);
    asks(request::Disable, r#""call":"disable""#);
    asks(request::Counts, r#""call":"counts""#);
    asks(request::Read, r#""call":"read""#);
    asks(request::Close, r#""call":"close""#);
    asks(
        request::Ring {
            vcpu: 1,
            pages: 64,
            overwrite: false,
        },
        r#""call":"ring","vcpu":1,"pages":64"#,
    );
    asks(
        request::Ring {
            vcpu: 1,
            pages: 64,
            overwrite: true,
        },
        r#""call":"ring","vcpu":1,"pages":64,"overwrite":true"#,
    );
    asks(
        request::HostRing { handle: 3 },
        r#""call":"host_ring","handle":3"#,
    );
    asks(
        request::ThreadSwitches { vcpu: 1 },
        r#""call":"thread_switches","vcpu":1"#,
    );
    asks(
        request::Chains { handle: 3, every: 8 },
        r#""call":"chains","handle":3,"every":8"#,
    );
    asks(request::RingLosses, r#""call":"ring_losses""#);
    asks(request::Kernel, r#""call":"kernel""#);
    asks(request::Symbols, r#""call":"symbols""#);
    asks(
        request::ProcessCode { pid: 12 },
        r#""call":"process_code","pid":12"#,
    );
    asks(
        request::ProcessMemory {
            pid: 12,
            address: 4096,
            bytes: 64,
        },
        r#""call":"process_memory","pid":12,"address":4096,"bytes":64"#,
    );
    asks(request::Snapshot, r#""call":"snapshot""#);
    asks(
        request::SnapshotMemory { offset: 4096 },
        r#""call":"snapshot_memory","offset":4096"#,
    );
    asks(request::SnapshotState, r#""call":"snapshot_state""#);
    asks(request::SnapshotShareDisks, r#""call":"snapshot_share_disks""#);
    asks(
        request::SnapshotEnd { stop: true },
        r#""call":"snapshot_end","stop":true"#,
    );
    asks(request::MigrationStart, r#""call":"migration_start""#);
    asks(
        request::MigrationMemory { offset: 4096 },
        r#""call":"migration_memory","offset":4096"#,
    );
    asks(request::MigrationCommit, r#""call":"migration_commit""#);
    asks(request::GuestView, r#""call":"guest_view""#);
    asks(
        request::GuestViewResult { generation: 5 },
        r#""call":"guest_view_result","generation":5"#,
    );
}

#[test]
fn open_request_omits_defaults() {
    let open = request::Open {
        events: "{cycles,kvm:exits}".into(),
        ..Default::default()
    };
    asks(open.clone(), r#""call":"open","events":"{cycles,kvm:exits}""#);
    let whole = request::Open {
        whole: true,
        ..open.clone()
    };
    asks(
        whole,
        r#""call":"open","events":"{cycles,kvm:exits}","whole":true"#,
    );
    let sampling = SamplingParams {
        rate: 999,
        frequency: true,
        callchain: true,
        chain_every: 1,
        ..Default::default()
    };
    let sampled = request::Open {
        vcpus: Some(vec![0, 2]),
        sampling: Some(sampling),
        ..open.clone()
    };
    asks(
        sampled,
        r#""call":"open","events":"{cycles,kvm:exits}","vcpus":[0,2],"sampling":{"rate":999,"frequency":true,"callchain":true}"#,
    );
    let branches = request::Open {
        sampling: Some(SamplingParams {
            branches: Some(BranchStacks {
                filter: 10,
                depth: 32,
                overhead_permille: 50,
            }),
            ..sampling
        }),
        ..open.clone()
    };
    asks(
        branches,
        r#""call":"open","events":"{cycles,kvm:exits}","sampling":{"rate":999,"frequency":true,"callchain":true,"branches":{"filter":10,"depth":32,"overhead_permille":50}}"#,
    );
    let sampled = request::Open {
        sampling: Some(SamplingParams {
            chain_every: 8,
            ..sampling
        }),
        ..open
    };
    asks(
        sampled,
        r#""call":"open","events":"{cycles,kvm:exits}","sampling":{"rate":999,"frequency":true,"callchain":true,"chain_every":8}"#,
    );
}

#[test]
fn replies_match_version_1() {
    answers::<request::RateLimiters>(
        r#"[{"name":"net0-tx","bandwidth":{"size":1,"one_time_burst":2,"refill_ms":3},"throttled":4},
            {"name":"disk0","ops":{"size":1,"refill_ms":3},"throttled":0}]"#,
    );
    answers::<request::Status>(
        r#"{"protocol":1,"version":"0.1.0","name":"one","pid":42,"vcpus":2,"pmu":"intel-v2","guest":"(built-in guest)",
            "state":"paused","parked":2,"uptime_ms":1500,"role":"operator"}"#,
    );
    for state in ["running", "paused", "stopped"] {
        same::<control_api::protocol::VmState>(&format!("\"{state}\""));
    }
    for role in ["admin", "operator", "observer"] {
        same::<control_api::protocol::ClientRole>(&format!("\"{role}\""));
    }
    answers::<request::Open>(
        r#"[{"handle":0,"name":"cycles","index":0,"vcpu":1,"backing":"clock","nanoseconds":false,"estimate":true,"id":9,
            "kind":0,"config":0},
            {"handle":null,"unsupported":"this host has no PMU","name":"cache-misses","index":1,"backing":"hardware",
            "nanoseconds":false,"estimate":false,"id":0,"kind":0,"config":3,"ring":true,"no_ring":"why"}]"#,
    );
    answers::<request::Read>(
        r#"[{"handle":0,"value":10,"enabled_ns":4,"running_ns":2,"estimate":20,"standard_error":1.5,"failed":false},
            {"handle":0,"value":10,"enabled_ns":4,"running_ns":2,"estimate":20,"standard_error":null,"bound":6.0,"failed":false},
            {"handle":1,"value":10,"enabled_ns":4,"running_ns":4,"estimate":null,"standard_error":null,"failed":true,
            "vcpus":[{"vcpu":0,"value":10,"enabled_ns":4,"running_ns":4,"estimate":null}]}]"#,
    );
    answers::<request::Ring>(r#"{"vcpu":0,"sample_type":66087}"#);
    answers::<request::HostRing>(r#"{"period":null,"clock_offset_ns":12,"interpreted":false}"#);
    answers::<request::RingLosses>(r#"[{"vcpu":0,"lost":3}]"#);
    for state in ["unknown", "looking", "found", "not_found"] {
        answers::<request::Kernel>(&format!(r#"{{"state":"{state}","detail":"Linux 6.1"}}"#));
    }
    answers::<request::Symbols>(r#"{"bytes":100,"flat":true,"source":"guest memory"}"#);
    answers::<request::ProcessCode>(
        r#"{"mappings":[{"start":4096,"len":8192,"file_offset":4096,"base":0,"path":"/bin/a","build_id":"ab01"},
            {"start":65536,"len":4096,"file_offset":0,"path":"//anon"}],"cut_short":true}"#,
    );
    answers::<request::ProcessMemory>(r#"{"bytes":64,"missing":[[0,16]]}"#);
    answers::<request::GuestView>(r#"{"generation":4}"#);
    answers::<request::GuestViewResult>(
        r#"{"complete":true,"vcpus":[{"vcpu":0,"pmis":3,"uncounted_ns":0,"places_lost":0,"counters":[
            {"counter":"gp0","enabled":true,"event":"cycles","allowed":true,"backing":"clock","value":5,"counted":5,
            "enabled_ns":1,"running_ns":1,"overflows":0,"pmi_requests":0,"counting":true,"fallback":false,
            "uncounted_ns":0}]}]}"#,
    );
}

#[test]
fn reply_is_result_or_failure() {
    same::<ReplyLine>(r#"{"id":7,"ok":{"generation":4}}"#);
    for (kind, name) in [
        (RequestErrorKind::Protocol, "protocol"),
        (RequestErrorKind::Rate, "rate"),
        (RequestErrorKind::Invalid, "invalid"),
        (RequestErrorKind::Denied, "denied"),
        (RequestErrorKind::Limit, "limit"),
        (RequestErrorKind::Unsupported, "unsupported"),
        (RequestErrorKind::Internal, "internal"),
    ] {
        let reply = ReplyLine {
            id: 7,
            ok: None,
            error: Some(RequestError {
                kind,
                message: "why".into(),
            }),
        };
        let line = format!(r#"{{"id":7,"error":{{"kind":"{name}","message":"why"}}}}"#);
        assert_eq!(serde_json::to_string(&reply).unwrap(), line);
        same::<ReplyLine>(&line);
    }
}

/// Calls that were added to version 1 later keep their serialized form. A client that does not use
/// a call does not receive its reply.
#[test]
fn vcpu_hotplug_messages_match_version_1() {
    asks(request::Vcpus { count: 3 }, r#""call":"vcpus","count":3"#);
    asks(request::VcpuPlug, r#""call":"vcpu_plug""#);
    asks(request::VcpusWithdraw, r#""call":"vcpus_withdraw""#);
    asks(request::Joined, r#""call":"joined""#);
    asks(request::Exits, r#""call":"exits""#);
    let code = request::Code {
        cr3: 4096,
        address: 16,
        length: 2,
    };
    asks(code, r#""call":"code","cr3":4096,"address":16,"length":2"#);
    answers::<request::Code>(r#"{"address":16,"hex":"90c3"}"#);
    let info = GuestCode::new(16, &[0x90, 0xc3]);
    assert_eq!(
        (info.hex.as_str(), info.bytes()),
        ("90c3", Some(vec![0x90, 0xc3]))
    );
    for hex in ["9", "9g", "é"] {
        let hex = hex.to_owned();
        assert_eq!(GuestCode { address: 0, hex }.bytes(), None);
    }
    answers::<request::VcpuPlug>(
        r#"{"present":[0,1],"max":4,"unnoticed":[1],"asked_for":[],"leaving":[],"refused":[{"vcpu":2,"status":130}]}"#,
    );
    answers::<request::Exits>(
        r#"[{"vcpu":1,"exits":[{"reason":"rdmsr","count":3,"timed":2,"time_ns":900,"max_ns":500}]}]"#,
    );
    answers::<request::Joined>(r#"[{"vcpu":1,"events":[]},{"vcpu":2,"events":[],"refused":"why"}]"#);
}

/// Replies that were added later are accepted with all optional fields.
#[test]
fn optional_fields_are_accepted() {
    answers::<request::Status>(
        r#"{"protocol":1,"version":"0.1.0","name":"one","pid":42,"vcpus":2,"max_vcpus":4,"pmu":"intel-v2","guest":"g",
            "console":"pty=/dev/pts/3","virtio_console":"tty","threads":[43,44],"state":"running","parked":0,
            "uptime_ms":1500,"role":"admin"}"#,
    );
    answers::<request::Symbols>(
        r#"{"bytes":100,"flat":false,"source":"guest memory","build_id":"ab01","release":"6.1.0-32-amd64"}"#,
    );
    answers::<request::Read>(
        r#"[{"handle":0,"value":10,"enabled_ns":4,"running_ns":4,"estimate":10,"standard_error":0.0,"failed":false,
            "gone":true,"vcpus":[{"vcpu":3,"value":10,"enabled_ns":4,"running_ns":4,"estimate":10,
            "standard_error":0.5,"bound":1.5}]}]"#,
    );
    answers::<request::Counts>(
        r#"[{"vcpu":1,"exits":9,"kinds":{"halt":2,"rdmsr":7},"register_faults":1,"pmi_nmi":2,"pmi_vector":3,"pmi_none":4,
            "pmi_throttled":5,"pmi_held":11,"pmi_held_ns":12,"pmi_masked_waits":6,"pmi_withdrawn":7,"steps":8,"steps_lost":9,"unstepped":10,
            "context":{"events":1,"active":2,"waiting_groups":3,"samples":4,"lost_samples":5,"throttles":6}}]"#,
    );
    // Counters that a VM does not report are 0.
    let less: control_api::counts::VcpuCounts = serde_json::from_str(r#"{"vcpu":1,"exits":9}"#).unwrap();
    assert_eq!(
        (less.vcpu, less.exits, less.pmi_nmi, less.context),
        (1, 9, 0, None)
    );
    let sampling = SamplingParams {
        rate: 1000,
        callchain: true,
        chain_every: 1,
        stack_bytes: 8192,
        ..Default::default()
    };
    let open = request::Open {
        events: "cycles".into(),
        sampling: Some(sampling),
        ..Default::default()
    };
    asks(
        open,
        r#""call":"open","events":"cycles","sampling":{"rate":1000,"frequency":false,"callchain":true,"stack_bytes":8192}"#,
    );
    for request in ["resume", "stop", "powerdown", "pause", "hello"] {
        answers_status(request);
    }
}

/// Checks that a call that changes the VM's state returns the new state.
#[track_caller]
fn answers_status(call: &str) {
    let schema = control_api::schema();
    assert_eq!(schema["results"][call], schema["results"]["status"], "{call}");
}

/// An invalid line is rejected, and unknown fields of a valid request are ignored.
#[test]
fn invalid_requests_are_rejected() {
    for line in [
        "",
        "null",
        "[]",
        r#"{"id":7}"#,
        r#"{"call":"status"}"#,
        r#"{"id":7,"call":"Status"}"#,
        r#"{"id":7,"call":"become_root"}"#,
        r#"{"id":-7,"call":"status"}"#,
        r#"{"id":18446744073709551616,"call":"status"}"#,
        r#"{"id":"7","call":"status"}"#,
        r#"{"id":7,"id":8,"call":"status"}"#,
        r#"{"id":7,"call":["status"]}"#,
        r#"{"id":7,"call":"hello"}"#,
        r#"{"id":7,"call":"hello","protocol":-1}"#,
        r#"{"id":7,"call":"ring","vcpu":0}"#,
        r#"{"id":7,"call":"ring","vcpu":4294967296,"pages":1}"#,
        r#"{"id":7,"call":"open","events":"cycles","vcpus":[-1]}"#,
        r#"{"id":7,"call":"open","events":"cycles","vcpus":0}"#,
        r#"{"id":7,"call":"open","events":"cycles","sampling":{"rate":1}}"#,
        r#"{"id":7,"call":"code","cr3":0,"address":0,"length":1.0}"#,
        r#"{"id":7,"call":"status"} {}"#,
    ] {
        let parsed = serde_json::from_str::<RequestLine>(line);
        assert!(parsed.is_err(), "{line}: {parsed:?}");
    }
    let deep = format!(
        r#"{{"id":7,"call":"status","x":{}{}}}"#,
        "[".repeat(30_000),
        "]".repeat(30_000)
    );
    assert!(deep.len() < control_api::protocol::MAX_REQUEST);
    assert!(serde_json::from_str::<RequestLine>(&deep).is_err(), "so deep");
    let more: RequestLine = serde_json::from_str(r#"{"why":{"a":1},"call":"status","id":7}"#).unwrap();
    assert_eq!((more.id, more.call), (7, Call::Status));
}
