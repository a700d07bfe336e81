//! The inventory in docs/perf-core.md: every number is accounted for, and every test it names exists.

#[path = "common/skip.rs"]
mod skip;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// All tests of the crate, with the file each is in, and all source files.
fn names(dir: &Path, tests: &mut BTreeSet<(String, String)>, files: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            names(&path, tests, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let file = path.file_stem().unwrap().to_string_lossy().into_owned();
            files.insert(file.clone());
            let text = fs::read_to_string(&path).unwrap();
            let mut lines = text.lines().peekable();
            while let Some(line) = lines.next() {
                // Only tests: what follows an attribute, or stands in a block of proptest, which takes attributes too.
                if !line.trim().starts_with("#[test]") {
                    continue;
                }
                while lines.peek().is_some_and(|l| !l.trim().starts_with("fn ")) {
                    lines.next();
                }
                let name = lines.next().unwrap_or_default().trim().trim_start_matches("fn ");
                let name = name.split('(').next().unwrap_or_default();
                tests.insert((file.clone(), name.to_owned()));
            }
        }
    }
}

/// Adds what a number column says, `3–5` and `T11–T18` included.
fn numbers(column: &str, all: &mut BTreeSet<(char, u32)>) {
    for part in column.split(',').map(str::trim) {
        let kind = part.chars().next().filter(|c| "TP".contains(*c)).unwrap_or('#');
        let number = |s: &str| s.trim_matches(['T', 'P', ' ']).parse::<u32>();
        let mut ends = part.split('–');
        let (Some(Ok(from)), to) = (ends.next().map(number), ends.next().map(number)) else {
            continue;
        };
        let to = to.and_then(Result::ok).unwrap_or(from);
        all.extend((from..=to).map(|n| (kind, n)));
    }
}

#[test]
fn every_number_is_accounted_for_and_every_test_it_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let Ok(page) = fs::read_to_string(root.join("../docs/perf-core.md")) else {
        skip::skipped("the crate stands alone here, without its page", false);
        return;
    };
    let (mut tests, mut files) = (BTreeSet::new(), BTreeSet::new());
    names(&root.join("src"), &mut tests, &mut files);
    names(&root.join("tests"), &mut tests, &mut files);
    assert!(tests.len() > 150, "{} tests found", tests.len());

    let (_, inventory) = page.split_once("## The inventory").unwrap();
    let (inventory, _) = inventory.split_once("## What it costs").unwrap();
    let mut seen = BTreeSet::new();
    let mut missing = Vec::new();
    for row in inventory.lines().filter(|l| l.starts_with('|')) {
        let columns: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let (Some(number), Some(test)) = (columns.first(), columns.last()) else {
            continue;
        };
        numbers(number, &mut seen);
        // What stands in backticks: every other piece.
        for name in test.split('`').skip(1).step_by(2) {
            let (file, name) = name.split_once(": ").map_or((None, name), |(f, n)| (Some(f), n));
            let whole = !name.contains(['…', '*']);
            let stem = name.split(['…', '*']).next().unwrap_or_default();
            // Error numbers, modules and files stand there as well.
            let is_test = stem.contains('_') && !stem.contains(['/', '.']);
            let is_it = |t: &str| if whole { t == stem } else { t.starts_with(stem) };
            let exists = || {
                tests
                    .iter()
                    .any(|(f, t)| is_it(t) && file.is_none_or(|file| f == file))
            };
            // `ring_*` stands for all tests of some files.
            if is_test && !files.contains(stem) && stem != "ring_" && !exists() {
                missing.push(format!("{number}: {name}"));
            }
        }
    }
    assert_eq!(
        missing,
        Vec::<String>::new(),
        "named in the inventory and not there"
    );
    for (kind, last) in [('#', 185), ('T', 38), ('P', 42)] {
        let left: Vec<_> = (1..=last).filter(|n| !seen.contains(&(kind, *n))).collect();
        assert_eq!(left, Vec::<u32>::new(), "not in the inventory: {kind}");
    }
}
