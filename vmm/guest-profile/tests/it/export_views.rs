//! Tests of reports (call graphs, columns, filters), of samples as text and JSON, and of the
//! formats of other viewers.

use std::collections::BTreeMap;

use guest_profile::export::call_tree::{CallGraphOptions, CallGraphOrder};
use guest_profile::export::filter::SampleFilter;
use guest_profile::export::report::{self, ProfileReportColumn, ProfileReportOptions, SortKey};
use guest_profile::export::script::{self, ScriptField, ScriptFields, ScriptFormat, ScriptOptions};
use guest_profile::export::symbolize::Symbolizer;
use guest_profile::export::{Profile, ProfileSample, firefox, folded, speedscope};
use serde_json::Value;

use super::export_formats::{kernel, profile, sample};

fn report(profile: &Profile, options: &ProfileReportOptions) -> String {
    let mut symbols = Symbolizer::new(profile, Some(kernel()), None);
    report::render(profile, &mut symbols, options)
}

fn script(profile: &Profile, options: &ScriptOptions) -> String {
    let (mut symbols, mut text) = (Symbolizer::new(profile, Some(kernel()), None), Vec::new());
    script::write_with(profile, &mut symbols, options, &mut text).unwrap();
    String::from_utf8(text).unwrap()
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

/// Returns the lines of a report that are neither comments nor empty.
fn rows(text: &str) -> Vec<&str> {
    let lines = text.lines().map(str::trim);
    lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect()
}

#[test]
fn report_prints_selected_columns_in_order() {
    let options = ProfileReportOptions {
        sort: vec![SortKey::Symbol],
        columns: Some(vec![
            ProfileReportColumn::Key(SortKey::Symbol),
            ProfileReportColumn::Period,
            ProfileReportColumn::Overhead,
        ]),
        ..ProfileReportOptions::default()
    };
    let text = report(&profile(), &options);
    let row = rows(&text)[0].split_whitespace().collect::<Vec<_>>();
    assert_eq!(row, ["[u]", "hot", "20", "50.00%"], "{text}");
    assert!(text.contains("# Symbol"), "{text}");
}

/// A filter selects the rows of a report. The shares of these rows still refer to all samples.
#[test]
fn report_filter_keeps_shares_of_all_samples() {
    let with = |filter| {
        let options = ProfileReportOptions {
            sort: vec![SortKey::Symbol],
            filter,
            ..ProfileReportOptions::default()
        };
        report(&profile(), &options)
    };
    for filter in [
        SampleFilter {
            symbols: names(&["vfs_read", "none"]),
            ..SampleFilter::default()
        },
        SampleFilter {
            objects: names(&["[guest.kernel]"]),
            comms: names(&["a;b"]),
            ..SampleFilter::default()
        },
    ] {
        let text = with(filter);
        let rows = rows(&text);
        assert!(rows.len() == 1 && rows[0].starts_with("25.00%"), "{text}");
        assert!(text.contains("# Samples: 4"), "{text}");
    }
    // A filter for a file name without directories matches the path of the object.
    let text = with(SampleFilter {
        objects: names(&["three"]),
        ..SampleFilter::default()
    });
    assert!(rows(&text) == ["50.00%             2  [u] hot"], "{text}");
    let text = with(SampleFilter {
        comms: names(&["another"]),
        ..SampleFilter::default()
    });
    assert!(rows(&text).is_empty(), "{text}");
}

#[test]
fn report_tells_different_weights() {
    const NOTE: &str = "different weights";
    let mut profile = profile();
    assert!(!report(&profile, &ProfileReportOptions::default()).contains(NOTE));
    profile.push(&ProfileSample {
        period: 11,
        ..sample()
    });
    assert!(report(&profile, &ProfileReportOptions::default()).contains(NOTE));
}

/// A report prints the callers of a function below its row, and the shares of the callers refer to
/// all samples.
#[test]
fn report_prints_call_graph_in_both_directions() {
    let graph = |order, sort| {
        let options = ProfileReportOptions {
            sort: vec![sort],
            call_graph: Some(CallGraphOptions {
                order,
                ..CallGraphOptions::default()
            }),
            ..ProfileReportOptions::default()
        };
        report(&profile(), &options)
    };
    let callee = graph(CallGraphOrder::Callee, SortKey::Symbol);
    let of_hot = "[u] hot\n            |\n            ---hot\n               main\n\n";
    assert!(callee.contains(of_hot), "{callee}");
    let caller = graph(CallGraphOrder::Caller, SortKey::Comm);
    let branches = "            ---main
               |
               |--50.00%--hot
               |
                --25.00%--three+0x800
                          entry
                          vfs_read
";
    assert!(caller.contains(branches), "{caller}");
}

/// The depth of the printed call graph is bounded, because the chains in a recording may be longer
/// than any real stack.
#[test]
fn call_graph_depth_is_bounded() {
    let mut long = profile();
    let chain: Vec<u64> = (0..5000).map(|n| 0x40_0000 + 2 * n).collect();
    for skip in 0..50 {
        long.push(&ProfileSample {
            period: 1000,
            chain: &chain[skip..],
            ..sample()
        });
    }
    let options = ProfileReportOptions {
        sort: vec![SortKey::Comm],
        call_graph: Some(CallGraphOptions::default()),
        ..ProfileReportOptions::default()
    };
    assert!(report(&long, &options).len() < 1 << 20);
}

#[test]
fn script_prints_selected_fields() {
    use ScriptField::{Comm, Event, Ip, Sym};
    let fields = |fields: &[ScriptField]| ScriptOptions {
        fields: ScriptFields::new(fields.to_vec()),
        ..ScriptOptions::default()
    };
    let heads = script(&profile(), &fields(&[Comm, Event]));
    assert_eq!(heads.lines().count(), 4, "{heads}");
    assert!(heads.lines().all(|line| line.ends_with(" cycles: ")), "{heads}");
    let chains = script(&profile(), &fields(&[Ip, Sym]));
    assert!(
        chains.contains("\t          400110 hot\n\t          400210 main\n"),
        "{chains}"
    );
    let all = script(&profile(), &ScriptOptions::default());
    assert!(
        all.contains("a;b 42/42 [000]     0.000000:         10 cycles: \n"),
        "{all}"
    );
    assert!(all.contains("400110 hot+0x10 (/bin/three)\n"), "{all}");
}

#[test]
fn script_prints_json_objects() {
    let options = ScriptOptions {
        format: ScriptFormat::Json,
        filter: SampleFilter {
            symbols: names(&["vfs_read"]),
            ..SampleFilter::default()
        },
        ..ScriptOptions::default()
    };
    let text = script(&profile(), &options);
    let sample: Value = serde_json::from_str(text.trim()).unwrap();
    assert_eq!(sample["comm"], "a;b");
    assert_eq!((&sample["pid"], &sample["time_ns"]), (&42.into(), &300.into()));
    assert_eq!(sample["frames"][0]["sym"], "vfs_read");
    assert_eq!(sample["frames"][0]["symoff"], 0x10);
    assert_eq!(sample["frames"][0]["ip"], "0xffffffff81000110");
    // The third frame has no symbol, so its name is null.
    assert_eq!(sample["frames"][2]["sym"], Value::Null);
    let options = ScriptOptions {
        format: ScriptFormat::Json,
        fields: ScriptFields::new(vec![ScriptField::Tid]),
        ..ScriptOptions::default()
    };
    assert!(script(&profile(), &options).starts_with("{\"tid\":42}\n"));
}

/// Each task has a profile with its stacks, outermost first, and their weights.
#[test]
fn speedscope_file_has_stacks_and_weights() {
    let p = profile();
    let (mut symbols, mut text) = (Symbolizer::new(&p, Some(kernel()), None), Vec::new());
    speedscope::write(&p, &mut symbols, &mut text).unwrap();
    let file: Value = serde_json::from_slice(&text).unwrap();
    assert!(file["$schema"].as_str().unwrap().contains("speedscope"));
    let profiles = file["profiles"].as_array().unwrap();
    assert_eq!(profiles.len(), 2);
    let of_task = &profiles[0];
    assert_eq!(
        (&of_task["name"], &of_task["type"]),
        (&"a;b: cycles".into(), &"sampled".into())
    );
    assert_eq!(
        (&of_task["endValue"], &of_task["weights"]),
        (&30.into(), &vec![10, 10, 10].into())
    );
    let names: Vec<&str> = of_task["samples"][2]
        .as_array()
        .unwrap()
        .iter()
        .map(|frame| {
            let frame = usize::try_from(frame.as_u64().unwrap()).unwrap();
            file["shared"]["frames"][frame]["name"].as_str().unwrap()
        })
        .collect();
    assert_eq!(names, ["main", "three+0x800", "entry", "vfs_read"]);
}

#[test]
fn firefox_profile_has_threads_and_samples() {
    let p = profile();
    let (mut symbols, mut text) = (Symbolizer::new(&p, Some(kernel()), None), Vec::new());
    firefox::write(&p, &p.events[0], &mut symbols, &mut text).unwrap();
    let file: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(file["meta"]["interval"], 1.0);
    assert_eq!(file["meta"]["symbolicated"], true);
    let threads = file["threads"].as_array().unwrap();
    assert_eq!(threads.len(), 2);
    let task = threads.iter().find(|thread| thread["name"] == "a;b").unwrap();
    assert_eq!(task["samples"]["length"], 3);
    assert_eq!(task["samples"]["weight"], Value::from(vec![1, 1, 1]));
    for name in ["main", "hot", "vfs_read"] {
        assert!(String::from_utf8_lossy(&text).contains(name), "{name}");
    }
}

/// In a differential flame graph, frames whose share has increased are red, and frames whose share
/// has decreased are blue, even if the two recordings have different lengths.
#[test]
fn differential_flame_graph_colours_changes_of_shares() {
    let stacks = |list: &[(&str, u64)]| -> BTreeMap<String, u64> {
        list.iter().map(|(stack, n)| ((*stack).to_owned(), *n)).collect()
    };
    let before = stacks(&[("task;same", 50), ("task;less", 40), ("task;more", 10)]);
    let after = stacks(&[("task;same", 500), ("task;less", 100), ("task;more", 400)]);
    let mut svg = Vec::new();
    folded::differential((&before, &after), "t", "cycles", 0.0, &mut svg).unwrap();
    let svg = String::from_utf8(svg).unwrap();
    let colour = |name: &str| -> Vec<u8> {
        let at = svg.find(&format!("<title>{name} (")).unwrap();
        let rgb = svg[at..].split("rgb(").nth(1).unwrap().split(')').next().unwrap();
        rgb.split(',').map(|part| part.trim().parse().unwrap()).collect()
    };
    let (more, less, same) = (colour("more"), colour("less"), colour("same"));
    assert!(more[0] > more[2], "{more:?}");
    assert!(less[2] > less[0], "{less:?}");
    assert!(same[0] == same[2], "{same:?}");
    let none = stacks(&[("task", 0)]);
    assert!(folded::differential((&none, &after), "t", "cycles", 0.0, &mut Vec::new()).is_err());
}
