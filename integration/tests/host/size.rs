//! Tests that source files have at most 800 lines, and that comments and pages do not exceed the
//! line width.

use std::fs;
use std::process::Command;

use integration::artefacts::workspace;

/// Maximum number of lines in a source file.
const MAX_LINES: usize = 800;
/// Maximum number of columns of a line, as in rustfmt.toml. rustfmt does not wrap comments.
const MAX_COLUMNS: usize = 110;

#[test]
fn files_and_lines_are_within_their_maximum() {
    let listed = Command::new("git")
        .args(["ls-files", "*.rs", "*.c", "*.S", "*.sh", "*.py", "*.md"])
        .current_dir(workspace())
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.lines().count() > 300, "{listed}");
    let mut faults = String::new();
    for name in listed.lines() {
        // A file that was deleted without a commit is still listed.
        let Ok(text) = fs::read_to_string(workspace().join(name)) else {
            continue;
        };
        let page = name.ends_with(".md");
        let lines = text.lines().count();
        if !page && lines > MAX_LINES {
            faults += &format!("{name}: {lines} lines\n");
        }
        let mut fenced = false;
        for (number, line) in text.lines().enumerate() {
            fenced ^= page && line.trim_start().starts_with("```");
            let comment = line.trim_start().starts_with("//");
            // Table rows and URLs cannot be wrapped.
            let content = line.trim_start().trim_start_matches(['/', '!', ' ']);
            let block = page && (fenced || line.starts_with("    "));
            let breakable =
                !block && !content.starts_with('|') && !line.contains("://") && !line.contains("](");
            if (page || comment) && breakable && line.chars().count() > MAX_COLUMNS {
                faults += &format!("{name}:{}: {line}\n", number + 1);
            }
        }
    }
    assert!(faults.is_empty(), "\n{faults}");
}
