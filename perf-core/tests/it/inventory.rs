//! Checks of the inventory in tests/inventory.md: it covers every number, every test that
//! it names exists, and every test asserts.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Collects all tests of the crate with their files, and all source files.
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
                // Tests follow a test attribute, possibly in a proptest block with further
                // attributes.
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

/// Adds the numbers of a number column, including ranges such as `3–5` and `T11–T18`.
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

/// Collects the functions of all files: file, name, whether it is a test, and body. The end is
/// found by Rustfmt's layout.
fn functions(dir: &Path, all: &mut Vec<(String, String, bool, String)>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, all);
            continue;
        }
        if path.extension().is_none_or(|e| e != "rs") {
            continue;
        }
        let file = path.file_stem().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        let (mut test, mut lines) = (false, text.lines());
        while let Some(line) = lines.next() {
            let code = line.trim_start();
            test |= code.starts_with("#[test]");
            let Some((_, rest)) = code.split_once("fn ").filter(|(before, _)| {
                before
                    .split_whitespace()
                    .all(|word| ["pub", "pub(crate)", "pub(super)", "unsafe", "const"].contains(&word))
            }) else {
                continue;
            };
            let name: String = rest
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect();
            let end = format!("{}}}", &line[..line.len() - code.len()]);
            let mut body = String::from(rest);
            if !line.ends_with('}') && !line.ends_with(';') {
                for line in lines.by_ref().take_while(|line| *line != end) {
                    body.push_str(line);
                    body.push('\n');
                }
            }
            all.push((file.clone(), name, std::mem::take(&mut test), body));
        }
    }
}

/// Each test asserts, or calls a function in the same file that does.
#[test]
fn every_test_asserts() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = Vec::new();
    functions(&root.join("src"), &mut all);
    functions(&root.join("tests"), &mut all);
    let says = |body: &str| {
        ["assert", "panic!", "unwrap_err"]
            .iter()
            .any(|word| body.contains(word))
    };
    // Assertions in the crate itself do not count.
    let mut helpers = Vec::new();
    functions(&root.join("tests"), &mut helpers);
    let shared: BTreeSet<String> = helpers.into_iter().map(|(_, name, ..)| name).collect();
    let asserting: Vec<(&str, &str)> = all
        .iter()
        .filter(|(_, _, test, body)| !test && says(body))
        .map(|(file, name, ..)| (file.as_str(), name.as_str()))
        .collect();
    let calls = |body: &str, name: &str| {
        body.match_indices(&format!("{name}("))
            .any(|(at, _)| !body[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    let helps = |here: &str, body: &str| {
        asserting
            .iter()
            .any(|(file, name)| (*file == here || shared.contains(*name)) && calls(body, name))
    };
    let tests: Vec<_> = all.iter().filter(|(_, _, test, _)| *test).collect();
    assert!(tests.len() > 150, "{} tests found", tests.len());
    let silent: Vec<_> = tests
        .iter()
        // Tests of the absence of panics need no assertion.
        .filter(|(file, name, _, body)| !name.contains("panic") && !says(body) && !helps(file, body))
        .map(|(file, name, ..)| format!("{file}: {name}"))
        .collect();
    assert_eq!(silent, Vec::<String>::new(), "tests that assert nothing");
}

#[test]
fn inventory_covers_all_numbers_and_names_existing_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let inventory = fs::read_to_string(root.join("tests/inventory.md")).unwrap();
    let (mut tests, mut files) = (BTreeSet::new(), BTreeSet::new());
    names(&root.join("src"), &mut tests, &mut files);
    names(&root.join("tests"), &mut tests, &mut files);
    assert!(tests.len() > 150, "{} tests found", tests.len());

    let mut seen = BTreeSet::new();
    let mut missing = Vec::new();
    for row in inventory.lines().filter(|l| l.starts_with('|')) {
        let columns: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let (Some(number), Some(test)) = (columns.first(), columns.last()) else {
            continue;
        };
        numbers(number, &mut seen);
        // Every second piece is enclosed in backticks.
        for name in test.split('`').skip(1).step_by(2) {
            let (file, name) = name.split_once(": ").map_or((None, name), |(f, n)| (Some(f), n));
            let whole = !name.contains(['…', '*']);
            let stem = name.split(['…', '*']).next().unwrap_or_default();
            // Backticks also enclose error numbers, modules and files.
            let is_test = stem.contains('_') && !stem.contains(['/', '.']);
            let is_it = |t: &str| if whole { t == stem } else { t.starts_with(stem) };
            let exists = || {
                tests
                    .iter()
                    .any(|(f, t)| is_it(t) && file.is_none_or(|file| f == file))
            };
            // `ring_*` represents all tests of several files.
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
