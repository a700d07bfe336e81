//! Tests that links between pages refer to existing pages and headings, and that paths mentioned in
//! the code exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::artefacts::workspace;

/// Returns the files below `directory` whose names end with one of `endings`. Skips build outputs
/// and hidden folders.
fn files(directory: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                files(&path, endings, found);
            }
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}

/// Returns the lines of a page that are not in fenced or indented blocks.
fn text(page: &str) -> Vec<&str> {
    let mut fenced = false;
    page.lines()
        .filter(|line| {
            if line.starts_with("```") {
                fenced = !fenced;
                return false;
            }
            !fenced && !line.starts_with("    ")
        })
        .collect()
}

/// Returns the anchor that GitHub generates for a heading: letters, digits, `-` and `_` in lower
/// case, and `-` for each space.
fn anchor(heading: &str) -> String {
    heading
        .trim()
        .to_lowercase()
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        })
        .collect()
}

fn anchors(page: &str) -> BTreeSet<String> {
    text(page)
        .into_iter()
        .filter(|line| line.starts_with('#'))
        .map(|line| anchor(line.trim_start_matches('#')))
        .collect()
}

/// Returns the link targets of a page, including images but not code in backticks.
fn targets(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in text(page) {
        let outside_code: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        for rest in outside_code.split("](").skip(1) {
            if let Some((target, _)) = rest.split_once(')') {
                found.push(target.to_owned());
            }
        }
    }
    found
}

/// Returns the broken links of the page with path `at` and text `page`.
fn broken(at: &Path, page: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for target in targets(page) {
        if target.starts_with("https://") || target.starts_with("http://") {
            continue;
        }
        let (path, heading) = target
            .split_once('#')
            .map_or((target.as_str(), None), |(path, heading)| (path, Some(heading)));
        let to = if path.is_empty() {
            at.to_path_buf()
        } else {
            at.parent().unwrap().join(path)
        };
        if !path.is_empty() && !to.exists() {
            wrong.push(format!("{}: {target}: no such file", at.display()));
        } else if let Some(heading) = heading {
            let there = if path.is_empty() {
                page.to_owned()
            } else {
                fs::read_to_string(&to).unwrap()
            };
            if !anchors(&there).contains(heading) {
                wrong.push(format!("{}: {target}: no such heading", at.display()));
            }
        }
    }
    wrong
}

#[test]
fn documentation_links_resolve() {
    let mut pages = Vec::new();
    files(workspace(), &[".md"], &mut pages);
    let (mut links, mut wrong) = (0, Vec::new());
    for path in &pages {
        let page = fs::read_to_string(path).unwrap();
        links += targets(&page).len();
        wrong.extend(broken(path, &page));
    }
    assert!(
        pages.len() > 15 && links > 30,
        "{} pages with {links} links found",
        pages.len()
    );
    assert_eq!(wrong, Vec::<String>::new(), "broken links");
}

/// Every documentation page that a source file mentions exists, and so does every source file that
/// docs/architecture.md mentions.
#[test]
fn paths_named_in_sources_and_walks_exist() {
    let root = workspace();
    let grep = |pattern: &str, files: &[&str]| {
        let mut git = Command::new("git");
        git.args(["grep", "-ohE", pattern, "--"]).args(files);
        let output = git.current_dir(root).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let sources = [
        "*.rs",
        "*.c",
        "*.h",
        "*.S",
        "*.toml",
        "Makefile",
        "guest-images/init",
    ];
    // The character before the path excludes URLs and longer paths.
    let pages = grep(r"(^|[^-/.[:alnum:]])docs/[-/_.[:alnum:]]+\.md", &sources);
    let walks = grep(
        r"`(perf-core|vpmu|vmm)/[-/_.[:alnum:]]+`",
        &["docs/architecture.md"],
    );
    let path = |line: &'_ str| line.trim_matches(|c: char| !c.is_alphanumeric()).to_owned();
    let named: BTreeSet<String> = pages.lines().chain(walks.lines()).map(path).collect();
    assert!(named.len() > 30, "{named:?}");
    let missing: Vec<&String> = named.iter().filter(|path| !root.join(path).exists()).collect();
    assert_eq!(missing, Vec::<&String>::new());
}

#[test]
fn broken_link_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(
        folder.path().join("other.md"),
        "# A page\n\n## What it *costs*: 2 %\n\n```\n# no heading\n```\n",
    )
    .unwrap();
    let page = "\
# Here

[right](other.md), [right](other.md#what-it-costs-2-), [right](#here), [elsewhere](https://example.com/x)
[no file](missing.md) and [no heading](other.md#no-heading) and [none here](#there)
`[code](missing.md)`

    [an example](missing.md)
";
    let wrong = broken(&folder.path().join("page.md"), page);
    let ends: Vec<&str> = wrong
        .iter()
        .map(|line| line.split_once("page.md: ").unwrap().1)
        .collect();
    assert_eq!(
        ends,
        [
            "missing.md: no such file",
            "other.md#no-heading: no such heading",
            "#there: no such heading"
        ]
    );
}
