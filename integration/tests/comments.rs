//! Comments and pages are as wide as the code. rustfmt holds the code to its width and leaves comments as
//! they are.

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
