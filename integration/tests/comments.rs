//! Comments are as wide as the code. rustfmt holds the code to its width and leaves comments as they are.

use std::fs;
use std::path::{Path, PathBuf};

use integration::artefacts::workspace;

/// Columns, as in `rustfmt.toml`.
const WIDTH: usize = 110;

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                sources(&path, found);
            }
        } else if name.ends_with(".rs") {
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
    let mut files = Vec::new();
    sources(workspace(), &mut files);
    assert!(files.len() > 300, "{} sources", files.len());
    let mut wide = Vec::new();
    for path in files {
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

#[test]
fn a_wide_comment_is_seen() {
    let long = "word ".repeat(22);
    assert!(is_too_wide(&format!("// {long}")));
    assert!(is_too_wide(&format!("    /// {long}")));
    assert!(!is_too_wide(&format!("//! | {long} |")), "a table");
    assert!(!is_too_wide(&format!("let x = \"{long}\";")), "code is rustfmt's");
    assert!(!is_too_wide("// short"));
}
