//! Comments and pages are as wide as the code. rustfmt holds the code to its width and leaves comments as
//! they are. A file of source tells one story, and so is no longer than one can be told.

use std::fs;
use std::path::{Path, PathBuf};

use integration::artefacts::workspace;

/// Columns, as in `rustfmt.toml`.
const WIDTH: usize = 110;

/// The files below `directory` whose names end with `ending`. Build outputs and hidden folders are left out.
fn files(directory: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                files(&path, ending, found);
            }
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
}

/// Whether a line is a comment that is too wide. A row of a table and an address cannot be broken.
fn is_too_wide(line: &str) -> bool {
    let text = line.trim_start();
    let row = text.trim_start_matches(['/', '!']).trim_start().starts_with('|');
    text.starts_with("//") && line.chars().count() > WIDTH && !row && !text.contains("://")
}

#[test]
fn no_comment_is_wider_than_the_code() {
    let rustfmt = fs::read_to_string(workspace().join("rustfmt.toml")).unwrap();
    assert!(rustfmt.contains(&format!("max_width = {WIDTH}\n")), "{rustfmt}");
    let mut sources = Vec::new();
    files(workspace(), ".rs", &mut sources);
    assert!(sources.len() > 300, "{} sources", sources.len());
    let mut wide = Vec::new();
    for path in sources {
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| is_too_wide(line)) {
            wide.push(format!("{}:{}: {line}", path.display(), number + 1));
        }
    }
    assert!(
        wide.is_empty(),
        "wider than {WIDTH} columns:\n{}",
        wide.join("\n")
    );
}

/// Lines that a file of source may have.
const LONGEST: usize = 800;

/// Files that may be longer, each with the reason.
const LONG: &[(&str, &str)] = &[];

/// The files of `sources` that are longer than they may be, with the number of their lines.
fn long_files(sources: &[PathBuf]) -> Vec<String> {
    let lines = |path: &PathBuf| fs::read_to_string(path).unwrap().lines().count();
    sources
        .iter()
        .filter(|path| !LONG.iter().any(|(excepted, _)| path.ends_with(excepted)))
        .map(|path| (path, lines(path)))
        .filter(|(_, lines)| *lines > LONGEST)
        .map(|(path, lines)| format!("{}: {lines} lines", path.display()))
        .collect()
}

#[test]
fn no_file_of_source_is_longer_than_a_story() {
    let mut sources = Vec::new();
    for ending in [".rs", ".c", ".h", ".S", ".sh", ".py"] {
        files(workspace(), ending, &mut sources);
    }
    assert!(sources.len() > 300, "{} sources", sources.len());
    let long = long_files(&sources);
    assert!(
        long.is_empty(),
        "longer than {LONGEST} lines; divide them by what they tell:\n{}",
        long.join("\n")
    );
    for (excepted, _) in LONG {
        assert!(
            workspace().join(excepted).is_file(),
            "{excepted} is no file any more"
        );
    }
}

#[test]
fn a_long_file_is_seen() {
    let directory = tempfile::tempdir().unwrap();
    let [short, long] = [LONGEST, LONGEST + 1].map(|lines| {
        let path = directory.path().join(format!("{lines}.rs"));
        fs::write(&path, "// a line\n".repeat(lines)).unwrap();
        path
    });
    assert_eq!(
        long_files(&[short, long.clone()]),
        [format!("{}: 801 lines", long.display())]
    );
}

/// The lines of a page that are too wide, with their numbers. Examples are left out, and what cannot be
/// broken: a row of a table, an address.
fn wide_lines(page: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut wide = Vec::new();
    for (number, line) in (1..).zip(page.lines()) {
        let text = line.trim_start();
        if text.starts_with("```") {
            fenced = !fenced;
        } else if !fenced
            && line.chars().count() > WIDTH
            && !line.starts_with("    ")
            && !text.starts_with('|')
            && !text.contains("://")
        {
            wide.push((number, line));
        }
    }
    wide
}

#[test]
fn no_line_of_a_page_is_wider_than_the_code() {
    let mut pages = Vec::new();
    files(workspace(), ".md", &mut pages);
    assert!(pages.len() > 20, "{} pages", pages.len());
    let mut wide = Vec::new();
    for path in pages {
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in wide_lines(&text) {
            wide.push(format!("{}:{number}: {line}", path.display()));
        }
    }
    assert!(
        wide.is_empty(),
        "wider than {WIDTH} columns:\n{}",
        wide.join("\n")
    );
}

#[test]
fn a_wide_line_of_a_page_is_seen() {
    let long = "word ".repeat(23);
    let page = format!("short\n{long}\n| {long} |\n```\n{long}\n```\n    {long}\n- {long}\n");
    let numbers: Vec<_> = wide_lines(&page).iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [2, 8]);
}

#[test]
fn a_wide_comment_is_seen() {
    let long = "word ".repeat(22);
    assert!(is_too_wide(&format!("// {long}")));
    assert!(is_too_wide(&format!("    /// {long}")));
    assert!(!is_too_wide(&format!("//! | {long} |")), "a table");
    assert!(!is_too_wide(&format!("let x = \"{long}\";")), "code is rustfmt's");
    assert!(!is_too_wide("// short"));
}
