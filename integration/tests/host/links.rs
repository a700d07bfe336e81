//! Tests that links between pages refer to existing pages and headings, and that pages named in the
//! code exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use integration::artefacts::workspace;

/// Collects the files under `directory` whose names end with one of `endings`, without build
/// outputs and hidden folders.
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

/// Returns the text lines of a page, without fenced and indented blocks.
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

/// Returns the broken links of `page`, located at `at`.
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

#[test]
fn pages_named_in_sources_exist() {
    let root = workspace();
    let mut sources = Vec::new();
    files(
        root,
        &[".rs", ".md", ".c", ".h", ".S", ".toml", "Makefile"],
        &mut sources,
    );
    files(&root.join("guest-images/init"), &[""], &mut sources);
    let mut missing = BTreeMap::new();
    let mut named = 0;
    for path in &sources {
        let source = fs::read_to_string(path).unwrap();
        for (start, _) in source.match_indices("docs/") {
            // A longer path (`../docs/…`), or a URL of another project.
            if source[..start].ends_with(['/', '-', '.']) && !source[..start].ends_with("../") {
                continue;
            }
            let name: String = source[start..]
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || "/-_.".contains(*c))
                .collect();
            if let Some(end) = name.find(".md") {
                named += 1;
                let page = &name[..end + 3];
                if !root.join(page).exists() {
                    missing.insert(path.display().to_string(), page.to_owned());
                }
            }
        }
    }
    assert!(named > 20, "{named} pages named");
    assert_eq!(missing, BTreeMap::new(), "pages that do not exist");
}

/// Checks the code locations that `walks` names: `NAME` (`FILE`). Returns their number and the
/// missing names and files. `read` returns the text of a file.
fn missing_locations(walks: &str, read: impl Fn(&str) -> Option<String>) -> (usize, Vec<String>) {
    let words: Vec<&str> = walks.split('`').collect();
    let (mut places, mut wrong) = (0, Vec::new());
    for at in (1..words.len()).step_by(2) {
        let file = words[at];
        if !["perf-core/", "vpmu/", "vmm/"]
            .iter()
            .any(|crates| file.starts_with(crates))
        {
            continue;
        }
        let Some(source) = read(file) else {
            wrong.push(format!("{file}: no such file"));
            continue;
        };
        places += 1;
        let named = at.checked_sub(2).filter(|_| words[at - 1].trim() == "(");
        for name in named.into_iter().flat_map(|at| words[at].split("::")) {
            let is_there = source.match_indices(name).any(|(start, _)| {
                !source[..start].ends_with(is_name) && !source[start + name.len()..].starts_with(is_name)
            });
            if !is_there {
                wrong.push(format!("{file}: no {name}"));
            }
        }
    }
    (places, wrong)
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The two walks through the code in architecture.md refer to existing code.
#[test]
fn architecture_walks_refer_to_existing_code() {
    let page = fs::read_to_string(workspace().join("docs/architecture.md")).unwrap();
    let (_, walks) = page.split_once("\n## Two walks\n").expect("the walks");
    let walks = walks.split("\n## ").next().unwrap();
    let (places, wrong) = missing_locations(walks, |file| fs::read_to_string(workspace().join(file)).ok());
    assert!(places > 20, "{places} places");
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn broken_architecture_walk_is_detected() {
    let read =
        |file: &str| (file == "vmm/vmm/src/a.rs").then(|| "impl Some { fn step(&self) {} }".to_owned());
    let (places, wrong) = missing_locations(
        "`Some::step` (`vmm/vmm/src/a.rs`), `Some::ste`\n(`vmm/vmm/src/a.rs`), `vmm/vmm/src/a.rs`, `x` and `vmm/vmm/src/b.rs`",
        read,
    );
    assert_eq!(places, 3);
    assert_eq!(
        wrong,
        ["vmm/vmm/src/a.rs: no ste", "vmm/vmm/src/b.rs: no such file"]
    );
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
