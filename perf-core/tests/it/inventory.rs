//! Checks of the inventory of behaviors in tests/inventory.md: no behavior number is missing, and
//! each test that the inventory names exists.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Collects the texts and the names of all source files below `dir`.
fn read(dir: &Path, text: &mut String, files: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read(&path, text, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.insert(path.file_stem().unwrap().to_string_lossy().into_owned());
            *text += &fs::read_to_string(&path).unwrap();
        }
    }
}

/// Adds the behavior numbers in the inventory's number column to `all`. The column may contain
/// ranges such as `3–5` and `T11–T18`.
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
fn inventory_covers_all_numbers_and_names_existing_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let inventory = fs::read_to_string(root.join("tests/inventory.md")).unwrap();
    let (mut text, mut files) = (String::new(), BTreeSet::new());
    read(&root.join("src"), &mut text, &mut files);
    read(&root.join("tests"), &mut text, &mut files);

    let mut seen = BTreeSet::new();
    let mut missing = Vec::new();
    for row in inventory.lines().filter(|l| l.starts_with('|')) {
        let columns: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let (Some(number), Some(test)) = (columns.first(), columns.last()) else {
            continue;
        };
        numbers(number, &mut seen);
        // Splitting at backticks, every second part is a name in backticks.
        for name in test.split('`').skip(1).step_by(2) {
            let name = name.split_once(": ").map_or(name, |(_, name)| name);
            let stem = name.split(['…', '*']).next().unwrap_or_default();
            // Skips error numbers, modules and files, which are also in backticks.
            let is_test = stem.contains('_') && !stem.contains(['/', '.']);
            let end = if stem == name { "(" } else { "" };
            let exists = || text.contains(&format!("fn {stem}{end}"));
            // Skips `ring_*`, which stands for all tests of several files.
            if is_test && !files.contains(stem) && stem != "ring_" && !exists() {
                missing.push(format!("{number}: {name}"));
            }
        }
    }
    // Fails if the inventory names a test that does not exist.
    assert_eq!(missing, Vec::<String>::new());
    for (kind, last) in [('#', 185), ('T', 38), ('P', 42)] {
        let left: Vec<_> = (1..=last).filter(|n| !seen.contains(&(kind, *n))).collect();
        assert_eq!(left, Vec::<u32>::new(), "not in the inventory: {kind}");
    }
}
