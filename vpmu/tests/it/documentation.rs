//! Tests that event files and examples in the documentation match the code.

use std::path::PathBuf;

use vpmu::{EventFilter, Vendor, events};

fn docs(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../docs")
        .join(file)
}

/// The event files in the documentation match the code. After changing the events, regenerate the
/// files with `UPDATE_DOCS=1 cargo test -p vpmu --test it documentation::`.
#[test]
fn perf_event_files_are_up_to_date() {
    for (vendor, name) in [(Vendor::Intel, "intel"), (Vendor::Amd, "amd")] {
        for (ending, text) in [
            ("events", events::perf_event_list(vendor)),
            ("json", events::perf_event_table(vendor)),
        ] {
            let path = docs(&format!("reference/perf-events/perfvisor-{name}.{ending}"));
            if std::env::var_os("UPDATE_DOCS").is_some() {
                std::fs::write(&path, &text).unwrap();
            }
            let written = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                written == text,
                "{} differs from the events of the code",
                path.display()
            );
        }
    }
}

#[test]
fn documented_filter_examples_are_valid() {
    let text = std::fs::read_to_string(docs("reference/event-filter.md")).unwrap();
    let mut examples = Vec::new();
    let mut block = String::new();
    for line in text.lines().chain([""]) {
        match line.strip_prefix("    ") {
            Some(code) => block += &format!("{code}\n"),
            // An empty line may be part of a block. The next block starts at its action.
            None if line.is_empty() => block.push('\n'),
            None => examples.push(std::mem::take(&mut block)),
        }
    }
    examples.push(block);
    examples.retain(|example| example.contains("action = "));
    assert_eq!(examples.len(), 4);
    for example in examples {
        EventFilter::from_toml(&example).unwrap_or_else(|error| panic!("{error}:\n{example}"));
    }
}
