//! Tests of the text and terminal output for two VMs.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::commands::top::rows::TopExitRow;
use control_api::protocol::{GuestCounter, VcpuView, VmInfo};

fn symbol(weight: f64, pid: Option<u32>, object: &str, symbol: &str, kernel: bool) -> TopSymbolRow {
    TopSymbolRow {
        weight,
        samples: 10,
        pid,
        process: pid.map_or_else(String::new, |pid| format!("proc{pid}")),
        object: object.into(),
        symbol: symbol.into(),
        kernel,
    }
}

fn vm(label: &str, symbols: Vec<TopSymbolRow>) -> TopVmEntry {
    let rate = |per_second, share| EventRateCell::Rate { per_second, share };
    let counter = |event: Option<&str>, backing: Option<&str>| GuestCounter {
        counter: "gp0".into(),
        enabled: event.is_some(),
        event: event.map(Into::into),
        allowed: true,
        backing: backing.map(Into::into),
        value: 7,
        counted: Some(1_234_567),
        enabled_ns: Some(2),
        running_ns: Some(1),
        overflows: Some(3),
        pmi_requests: Some(2),
        counting: Some(true),
        ..GuestCounter::default()
    };
    let info = VmInfo {
        name: label.into(),
        vcpus: 2,
        pmu: "amd".into(),
        uptime_ms: 61_000,
        ..VmInfo::default()
    };
    let exit = |kvm, what: &str, time_share| TopExitRow {
        kvm,
        what: what.into(),
        per_second: 12.5,
        time_share,
        mean_ns: Some(1500).filter(|_| !kvm),
        longest_ns: Some(2500).filter(|_| !kvm),
    };
    let seen = TopVmData {
        vm: info,
        samples: 1500,
        lost: 2,
        symbols,
        vcpus: vec![
            TopVcpuRow {
                vcpu: 0,
                samples: 5,
                cells: vec![
                    rate(5e8, 1.0),
                    rate(1e7, 1.0),
                    rate(2.1e9, 0.5),
                    EventRateCell::NotSupported,
                ],
            },
            TopVcpuRow {
                vcpu: 1,
                samples: 0,
                cells: vec![
                    rate(2e8, 1.0),
                    EventRateCell::NotCounted,
                    EventRateCell::NotCounted,
                    EventRateCell::NotCounted,
                ],
            },
        ],
        exits: vec![exit(true, "exits", None), exit(false, "kick", Some(0.25))],
        views: vec![VcpuView {
            pmis: Some(0),
            counters: vec![
                counter(Some("cycles"), Some("clock")),
                counter(Some("cache-misses"), Some("none")),
            ],
            ..VcpuView::default()
        }],
    };
    TopVmEntry {
        label: label.into(),
        state: ObservedVmState::Shown(Box::new(seen)),
    }
}

fn of(all_vms: bool, vms: Vec<TopVmEntry>) -> TopScreen {
    TopScreen {
        event: "cycles".into(),
        frequency_hz: 250,
        all_vms,
        vms,
    }
}

fn one() -> TopScreen {
    let symbols = vec![
        symbol(1.0, Some(9), "/bin/b", "cool", false),
        symbol(6.0, Some(7), "/bin/a", "hot", false),
        symbol(3.0, Some(7), "[guest.kernel]", "do_work", true),
    ];
    of(false, vec![vm("box", symbols)])
}

fn two() -> TopScreen {
    let a = vm("a", vec![symbol(6.0, Some(7), "/bin/a", "hot", false)]);
    let b = vm(
        "b@7",
        vec![
            symbol(2.0, Some(7), "/bin/a", "hot", false),
            symbol(2.0, None, "?", "cold", false),
        ],
    );
    let failed = TopVmEntry {
        label: "c".into(),
        state: ObservedVmState::Failed("the VM is\nnot responding".into()),
    };
    of(true, vec![a, b, failed])
}

fn drawn(screen: &TopScreen, ui: &mut TopUiState, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen.draw(frame, ui)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

fn view(screen: &TopScreen, view: TopView) -> (TopUiState, String) {
    let mut ui = TopUiState::new(screen.all_vms);
    ui.view = view;
    let lines = drawn(screen, &mut ui, 140, 12).join("\n");
    (ui, lines)
}

#[test]
fn text_shows_all_views() {
    let text = one().text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("VM 'box', running, 2 vCPUs") && lines[0].contains("1,500 samples of cycles"));
    let at = |word: &str| lines.iter().position(|l| l.contains(word)).expect(word);
    assert!(
        at("hot") < at("do_work") && at("do_work") < at("cool"),
        "sorted by share"
    );
    assert!(lines[at("hot")].contains("60.00%") && lines[at("hot")].contains("[.] hot"));
    assert!(lines[at("do_work")].contains("[k] do_work"));
    assert!(text.contains("50.0%") && text.contains("1.0%") && text.contains("2,100,000,000 (50%)"));
    assert!(text.contains("<not counted>") && text.contains("<not supported>"));
    assert!(
        lines[at("proc7")].contains("90.00%") && lines[at("proc7")].contains("33.33%"),
        "{text}"
    );
    assert!(
        lines[at("kick")].contains("25.00%") && lines[at("kick")].contains("1.5"),
        "{text}"
    );
    let counter = lines[at("clock")];
    assert!(
        counter.contains("1,234,567") && counter.contains("50.0%"),
        "{counter}"
    );
    assert!(
        !lines[at("cache-misses")].contains("1,234,567"),
        "nobody counted it"
    );
}

/// In a table of all VMs, shares are relative to the total of all VMs, and a failed VM has one row
/// with the reason.
#[test]
fn all_vms_share_one_table() {
    let screen = two();
    let (mut ui, vms) = view(&screen, TopView::Vms);
    let row = |lines: &str, first: &str| {
        let found = lines.lines().find(|line| line.starts_with(first));
        found.unwrap_or_else(|| panic!("{first}: {lines}")).to_owned()
    };
    assert!(
        row(&vms, "a ").contains("60.00%") && row(&vms, "b@7 ").contains("40.00%"),
        "{vms}"
    );
    assert!(row(&vms, "a ").contains("70.0%"), "both vCPUs are busy: {vms}");
    assert!(
        !row(&vms, "a ").contains("1.0%"),
        "a sum without a part is none: {vms}"
    );
    assert!(row(&vms, "c ").contains("failed"), "{vms}");
    ui.shown_mut().cursor = 2;
    let foot = drawn(&screen, &mut ui, 140, 12).pop().unwrap();
    assert_eq!(foot, "c: the VM is not responding");
    assert!(
        vms.starts_with("perfvisor top: 2 of 3 VMs; 3,000 samples"),
        "{vms}"
    );
    let (_, symbols) = view(&screen, TopView::Symbols);
    assert!(row(&symbols, "  80.00%").contains("hot"), "{symbols}");
    let (mut ui, processes) = view(&screen, TopView::Processes);
    assert!(row(&processes, "a ").contains("60.00%") && row(&processes, "b@7 ").contains("20.00%"));
    assert!(processes.contains("[unknown]"), "{processes}");
    ui.process = Some(TopRowOwner {
        vm: "b@7".into(),
        pid: None,
    });
    ui.view = TopView::Symbols;
    let only = drawn(&screen, &mut ui, 140, 12).join("\n");
    assert!(
        only.contains("100.00%") && only.contains("cold") && !only.contains("hot"),
        "{only}"
    );
    assert!(only.contains("only no process of b@7; Esc: back"), "{only}");
}

#[test]
fn search_keeps_matching_rows() {
    let (screen, mut ui) = (one(), TopUiState::new(false));
    ui.search = "BIN/A".into();
    let lines = drawn(&screen, &mut ui, 100, 10);
    assert!(lines[3].contains("hot") && lines[4].is_empty(), "{lines:#?}");
    assert!(lines[3].contains("60.00%"), "shares stay those of the whole");
    assert!(lines[9].contains("'BIN/A' (1 found)"), "{lines:#?}");
}

#[test]
fn sort_order_depends_on_column_kind() {
    let (screen, mut ui) = (one(), TopUiState::new(false));
    let lines = drawn(&screen, &mut ui, 100, 10);
    assert!(lines[0].starts_with("perfvisor top: VM 'box'") && lines[9].starts_with("q quit"));
    assert!(
        lines[3].contains("hot") && lines[4].contains("do_work"),
        "{lines:#?}"
    );
    ui.shown_mut().sort = Some(2);
    assert!(
        drawn(&screen, &mut ui, 100, 10)[3].contains("/bin/a"),
        "by object"
    );
    ui.shown_mut().reverse = true;
    assert!(drawn(&screen, &mut ui, 100, 10)[3].contains("[guest.kernel]"));
    let (mut ui, _) = view(&screen, TopView::Vcpus);
    ui.shown_mut().sort = Some(1);
    let lines = drawn(&screen, &mut ui, 100, 10);
    assert!(
        lines[3].contains("50.0%") && lines[4].contains("20.0%"),
        "{lines:#?}"
    );
    ui.shown_mut().sort = Some(2);
    ui.shown_mut().reverse = false;
    assert!(
        drawn(&screen, &mut ui, 100, 10)[4].contains("<not counted>"),
        "last"
    );
}

/// Every terminal size can be drawn, with the cursor on a row.
#[test]
fn any_terminal_size_can_be_drawn() {
    for screen in [one(), two(), of(true, Vec::new())] {
        for (width, height) in [(1, 1), (10, 2), (3, 40), (200, 3), (80, 24)] {
            for view in TopView::available(screen.all_vms) {
                let mut ui = TopUiState::new(screen.all_vms);
                ui.view = *view;
                ui.shown_mut().cursor = 1000;
                ui.shown_mut().offset = 1000;
                drawn(&screen, &mut ui, width, height);
                assert!(ui.view_state().cursor <= 5 && ui.view_state().offset <= ui.view_state().cursor);
                if height == 24 {
                    assert_eq!(ui.view_state().offset, 0, "there is room for all");
                }
            }
        }
    }
}
