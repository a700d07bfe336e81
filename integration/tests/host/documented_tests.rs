//! Tests that documentation and tests agree. The tests named in vpmu/tests/inventory.md (behavior
//! of the virtual PMU) and integration/tests/faults.md (faults around a VM) must exist.
//! vpmu/tests/inventory.md must have a row for each register in docs/reference/vpmu.md.

use std::collections::BTreeSet;
use std::fs;

use integration::artefacts::workspace;

const PAGE: &str = "vpmu/tests/inventory.md";
const FAULTS: &str = "integration/tests/faults.md";

fn read(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the cells of each table row in `page`, without header and separator rows.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let mut found = Vec::new();
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let is_heading = lines.peek().is_some_and(|next| next.starts_with("|--"));
        if line.starts_with("| ") && !is_heading {
            found.push(line.trim_matches('|').split(" | ").map(str::trim).collect());
        }
    }
    found
}

/// Returns the part of `page` below the heading `heading`, up to the next heading of the same
/// level.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, rest) = page
        .split_once(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("no {heading}"));
    let rank = heading.split(' ').next().unwrap_or_default();
    rest.split(&format!("\n{rank} ")).next().unwrap_or_default()
}

/// Returns whether `source` contains a test named `name`, in Rust or in the language of a guest.
fn has_test(source: &str, name: &str, is_rust: bool) -> bool {
    let line = if is_rust {
        format!("fn {name}(")
    } else {
        format!("\nTEST({name}, ")
    };
    source.contains(&line)
}

/// Returns the tests that `page` names in backticks but that do not exist. A name is FILE::TEST, or
/// FILE for all of its tests.
fn missing(page: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let tables = rows(page);
    let names = tables.iter().filter_map(|row| row.get(1)).flat_map(|column| {
        let code = column.split('`').skip(1).step_by(2);
        code.collect::<Vec<_>>()
    });
    for name in names {
        let (file, test) = name.split_once("::").unwrap_or((name, ""));
        let is_rust = file.ends_with(".rs");
        if !is_rust && !file.ends_with(".c") {
            continue;
        }
        match fs::read_to_string(workspace().join(file)) {
            Err(error) => wrong.push(format!("{file}: {error}")),
            Ok(source) if !test.is_empty() && !has_test(&source, test, is_rust) => {
                wrong.push(format!("{file} has no test {test}"));
            }
            Ok(_) => {}
        }
    }
    wrong
}

#[test]
fn documented_tests_exist() {
    for (page, least) in [(PAGE, 60), (FAULTS, 20)] {
        let text = read(page);
        assert!(rows(&text).len() > least, "the tables of {page} are read");
        assert_eq!(missing(&text), Vec::<String>::new());
    }
}

#[test]
fn each_register_has_a_row() {
    let page = read("docs/reference/vpmu.md");
    let registers = section(&page, "## Registers");
    let registers: BTreeSet<&str> = rows(registers).iter().map(|row| row[0]).collect();
    assert!(registers.len() >= 18, "{registers:?}");
    let shown = read(PAGE);
    let shown = section(&shown, "## Registers");
    let shown: BTreeSet<&str> = rows(shown).iter().map(|row| row[0]).collect();
    let without: Vec<_> = registers.difference(&shown).collect();
    assert!(without.is_empty(), "{PAGE} has no row of {without:?}");
}
