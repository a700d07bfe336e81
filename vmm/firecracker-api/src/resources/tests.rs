use super::*;

fn drive(json: &str) -> Drive {
    serde_json::from_str(json).unwrap()
}

fn with_kernel(boot_args: Option<&str>) -> VmResources {
    let mut all = VmResources::default();
    let source = BootSource {
        kernel_image_path: "/k".into(),
        initrd_path: None,
        boot_args: boot_args.map(str::to_owned),
    };
    all.set_boot_source(source).unwrap();
    all
}

fn option<'o>(options: &'o [String], name: &str) -> Option<&'o str> {
    let prefix = format!("--{name}=");
    options.iter().find_map(|option| option.strip_prefix(&prefix))
}

#[test]
fn configuration_becomes_options() {
    let mut all = with_kernel(Some("console=ttyS0 pci=off quiet"));
    let second = r#"{"drive_id":"b","is_root_device":false,"path_on_host":"/b","is_read_only":true}"#;
    all.set_drive(drive(second)).unwrap();
    let root = r#"{"drive_id":"a","is_root_device":true,"path_on_host":"/a"}"#;
    all.set_drive(drive(root)).unwrap();
    let interface = r#"{"iface_id":"e","host_dev_name":"tap0","guest_mac":"06:00:00:00:00:01"}"#;
    all.set_interface(serde_json::from_str(interface).unwrap())
        .unwrap();
    let vsock = r#"{"guest_cid":5,"uds_path":"/v"}"#;
    all.set_vsock(serde_json::from_str(vsock).unwrap()).unwrap();
    let options = all.run_options().unwrap();
    let disks: Vec<&String> = options
        .iter()
        .filter(|option| option.starts_with("--disk"))
        .collect();
    assert_eq!(disks, ["--disk=/a", "--disk=/b,ro"]);
    assert_eq!(
        option(&options, "cmdline"),
        Some("console=ttyS0 quiet root=/dev/vda rw")
    );
    assert_eq!(
        option(&options, "net"),
        Some("tap=tap0,mac=06:00:00:00:00:01,vhost=off")
    );
    assert_eq!(option(&options, "vsock"), Some("cid=5,socket=/v"));
    assert_eq!(option(&options, "memory"), Some("128M"));
    assert_eq!(option(&options, "pmu"), Some("auto"));
    assert_eq!(option(&options, "rng"), Some("off"));
    assert_eq!(option(&with_kernel(None).run_options().unwrap(), "cmdline"), None);
}

#[test]
fn root_partition_is_named_by_its_uuid() {
    let mut all = with_kernel(None);
    let root = r#"{"drive_id":"a","is_root_device":true,"path_on_host":"/a","partuuid":"0eaa91a0-01",
        "is_read_only":true}"#;
    all.set_drive(drive(root)).unwrap();
    let options = all.run_options().unwrap();
    let line = option(&options, "cmdline").unwrap();
    assert!(
        line.starts_with("console=ttyS0 ") && line.ends_with(" root=PARTUUID=0eaa91a0-01 ro"),
        "{line}"
    );
}

/// A request with an unsupported field is rejected, and the message names the field.
#[test]
fn unsupported_fields_are_named() {
    let base = r#""drive_id":"a","is_root_device":false"#;
    let mut all = VmResources::default();
    for (field, body) in [
        (
            "io_engine",
            format!("{{{base},\"path_on_host\":\"/a\",\"io_engine\":\"Async\"}}"),
        ),
        ("socket", format!("{{{base},\"socket\":\"/s\"}}")),
        ("path_on_host", format!("{{{base}}}")),
        ("path_on_host", format!("{{{base},\"path_on_host\":\"/a,ro\"}}")),
        (
            "path_on_host",
            format!("{{{base},\"path_on_host\":\"/a\\u0000\"}}"),
        ),
    ] {
        let fault = all.set_drive(drive(&body)).unwrap_err();
        assert!(fault.message.starts_with(&format!("{field}: ")), "{fault:?}");
    }
    for (field, body) in [
        ("smt", r#"{"vcpu_count":2,"mem_size_mib":64,"smt":true}"#),
        (
            "cpu_template",
            r#"{"vcpu_count":2,"mem_size_mib":64,"cpu_template":"T2"}"#,
        ),
        (
            "track_dirty_pages",
            r#"{"vcpu_count":2,"mem_size_mib":64,"track_dirty_pages":true}"#,
        ),
        ("vcpu_count", r#"{"vcpu_count":33,"mem_size_mib":64}"#),
        ("mem_size_mib", r#"{"vcpu_count":1,"mem_size_mib":0}"#),
        (
            "mem_size_mib",
            r#"{"vcpu_count":1,"mem_size_mib":63,"huge_pages":"2M"}"#,
        ),
    ] {
        let fault = all.set_machine(serde_json::from_str(body).unwrap()).unwrap_err();
        assert!(fault.message.starts_with(&format!("{field}: ")), "{fault:?}");
    }
    for field in ["cpu-config", "memory-hotplug"] {
        let config = serde_json::from_str(&format!("{{\"{field}\":{{}}}}")).unwrap();
        let fault = VmResources::from_config(config).unwrap_err();
        assert!(
            fault.message.starts_with(&format!("{field}: unsupported")),
            "{fault:?}"
        );
    }
    assert_eq!(all, VmResources::default());
}

/// A limiter without any limit, which some clients always send, adds no option.
#[test]
fn rate_limiters_become_options() {
    let mut all = with_kernel(None);
    let body = r#"{"drive_id":"a","is_root_device":false,"path_on_host":"/a","is_read_only":true,
        "rate_limiter":{"bandwidth":{"size":1000,"refill_time":100,"one_time_burst":50},"ops":null}}"#;
    all.set_drive(drive(body)).unwrap();
    let unlimited = r#"{"drive_id":"b","is_root_device":false,"path_on_host":"/b",
        "rate_limiter":{"bandwidth":{"size":0,"refill_time":100},"ops":{"size":10,"refill_time":0}}}"#;
    all.set_drive(drive(unlimited)).unwrap();
    let interface = r#"{"iface_id":"e","host_dev_name":"tap0",
        "rx_rate_limiter":{"bandwidth":{"size":1,"refill_time":2},"ops":{"size":3,"refill_time":4}},
        "tx_rate_limiter":{"ops":{"size":18446744073709551615,"refill_time":1}}}"#;
    all.set_interface(serde_json::from_str(interface).unwrap())
        .unwrap();
    let entropy = r#"{"rate_limiter":{"bandwidth":{"size":7,"refill_time":8}}}"#;
    all.set_entropy(serde_json::from_str(entropy).unwrap());
    let options = all.run_options().unwrap();
    assert!(options.contains(&"--disk=/a,ro,bandwidth=1000/100+50".into()));
    assert!(options.contains(&"--disk=/b".into()));
    assert_eq!(
        option(&options, "net"),
        Some("tap=tap0,vhost=off,rx-bandwidth=1/2+0,rx-ops=3/4+0,tx-ops=18446744073709551615/1+0")
    );
    assert_eq!(option(&options, "rng-limits"), Some("bandwidth=7/8+0"));
    let restored = VmResources::from_config(all.to_saved_config())
        .unwrap()
        .restore_options();
    assert!(restored.contains(&"--disk=/a,ro,bandwidth=1000/100+50".into()));
}

/// An update of a rate limiter does not change a limit that it omits. The root device is the first
/// disk of the VM, so its limiter has the name of the first disk.
#[test]
fn limiter_updates_are_merged() {
    let mut all = VmResources::default();
    for (id, root) in [("a", false), ("b", true)] {
        let body = format!(
            r#"{{"drive_id":"{id}","is_root_device":{root},"path_on_host":"/{id}",
            "rate_limiter":{{"ops":{{"size":1,"refill_time":1}}}}}}"#
        );
        all.set_drive(drive(&body)).unwrap();
    }
    let update = |text: &str| serde_json::from_str::<DriveUpdate>(text).unwrap();
    let body = r#"{"drive_id":"a","rate_limiter":{"bandwidth":{"size":2,"refill_time":2}}}"#;
    let change = all.update_drive(update(body)).unwrap().unwrap();
    assert_eq!((change.name.as_str(), change.limiter.ops), ("disk1", None));
    let limiter = all.to_config().drives[0].rate_limiter.unwrap();
    assert_eq!(
        (limiter.bandwidth.unwrap().size, limiter.ops.unwrap().size),
        (2, 1)
    );
    assert_eq!(all.update_drive(update(r#"{"drive_id":"b"}"#)), Ok(None));
    for (body, field) in [
        (r#"{"drive_id":"c"}"#, "drive_id: no drive 'c'"),
        (
            r#"{"drive_id":"a","path_on_host":"/x"}"#,
            "path_on_host: unsupported",
        ),
    ] {
        let fault = all.update_drive(update(body)).unwrap_err();
        assert!(fault.message.starts_with(field), "{fault:?}");
    }
}

#[test]
fn conflicting_devices_are_rejected() {
    let mut all = VmResources::default();
    let root = |id: &str| {
        drive(&format!(
            r#"{{"drive_id":"{id}","is_root_device":true,"path_on_host":"/a"}}"#
        ))
    };
    all.set_drive(root("a")).unwrap();
    all.set_drive(root("a")).unwrap();
    assert!(
        all.set_drive(root("b"))
            .unwrap_err()
            .message
            .starts_with("is_root_device: 'a'")
    );
    let interface = |id: &str, tap: &str, mac: &str| {
        let body = format!(r#"{{"iface_id":"{id}","host_dev_name":"{tap}","guest_mac":"{mac}"}}"#);
        serde_json::from_str(&body).unwrap()
    };
    all.set_interface(interface("a", "tap0", "06:00:00:00:00:0a"))
        .unwrap();
    let same_mac = all
        .set_interface(interface("b", "tap1", "06:00:00:00:00:0A"))
        .unwrap_err();
    assert!(same_mac.message.starts_with("guest_mac: "), "{same_mac:?}");
    let same_tap = all
        .set_interface(interface("b", "tap0", "06:00:00:00:00:0b"))
        .unwrap_err();
    assert!(same_tap.message.starts_with("host_dev_name: "), "{same_tap:?}");
}

#[test]
fn exported_configuration_can_be_imported() {
    let mut all = with_kernel(Some("quiet"));
    all.set_metrics(Metrics {
        metrics_path: "/m".into(),
    })
    .unwrap();
    all.set_drive(drive(
        r#"{"drive_id":"a","is_root_device":true,"path_on_host":"/a"}"#,
    ))
    .unwrap();
    let text = serde_json::to_string(&all.to_config()).unwrap();
    let again = VmResources::from_config(serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(again.run_options(), all.run_options());
    assert_eq!(again.to_config(), all.to_config());
}

#[test]
fn metadata_service_needs_interfaces_and_a_link_local_address() {
    let interface =
        r#"{"iface_id":"eth0","host_dev_name":"tap0"},{"iface_id":"eth1","host_dev_name":"tap1"}"#;
    let config = |mmds: &str| {
        let text = format!(r#"{{"network-interfaces":[{interface}],"mmds-config":{mmds}}}"#);
        VmResources::from_config(serde_json::from_str(&text).unwrap())
    };
    for (mmds, said) in [
        (r#"{"network_interfaces":[]}"#, "network_interfaces: must not"),
        (
            r#"{"network_interfaces":["eth0","a\n"]}"#,
            "network_interfaces: no interface \"a\\n\"",
        ),
        (
            r#"{"network_interfaces":["eth0"],"ipv4_address":"10.0.0.1"}"#,
            "ipv4_address: ",
        ),
        (
            r#"{"network_interfaces":["eth0"],"ipv4_address":"x"}"#,
            "ipv4_address: ",
        ),
    ] {
        let fault = config(mmds).unwrap_err();
        assert!(fault.message.starts_with(said), "{fault:?}");
    }
    let all = config(
        r#"{"network_interfaces":["eth1"],"version":"V2","ipv4_address":"169.254.170.2","imds_compat":true}"#,
    )
    .unwrap();
    let options = all.device_options();
    let nets: Vec<&str> = options.iter().map(String::as_str).collect();
    assert!(
        nets.contains(&"--net=tap=tap0,vhost=off") && nets.contains(&"--net=tap=tap1,vhost=off,mmds=on"),
        "{options:?}"
    );
    assert_eq!(
        all.mmds_option(9).unwrap(),
        "--mmds=version=v2,address=169.254.170.2,imds-compat=on,size-limit=9"
    );
    let saved = all.to_saved_config().mmds_config.unwrap();
    assert_eq!(saved.network_interfaces, ["eth1"]);
}
