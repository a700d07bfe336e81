//! The arrows of the house run one way: between crates, as `cargo metadata` says, and between the modules of
//! a crate, as their imports say. docs/architecture.md draws them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use integration::artefacts::{cargo_metadata, workspace};

/// Each crate of the product and the crates of ours that it may depend on. A crate stands below all that may
/// depend on it.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("perf-core", &[]),
    ("vpmu", &["perf-core"]),
    ("kernel-images", &[]),
    ("guest-profile", &["kernel-images", "perf-core"]),
    ("control-api", &["perf-core"]),
    (
        "vmm",
        &[
            "control-api",
            "guest-profile",
            "kernel-images",
            "perf-core",
            "vpmu",
        ],
    ),
    ("validate", &["control-api", "perf-core", "vpmu"]),
    (
        "perfvisor",
        &[
            "control-api",
            "guest-images",
            "guest-profile",
            "kernel-images",
            "perf-core",
            "validate",
            "vmm",
            "vpmu",
        ],
    ),
];

/// Crates of others that one crate of ours has for itself.
const ONE_USER: &[(&str, &str)] = &[
    ("kvm-ioctls", "vmm"),
    ("kvm-bindings", "vmm"),
    ("linux-loader", "vmm"),
    ("vm-superio", "vmm"),
    ("clap", "perfvisor"),
    ("ratatui", "perfvisor"),
    ("linux-perf-data", "guest-profile"),
];

/// Modules that are in a cycle and are still to be taken out of it. None may join them.
const KNOWN_CYCLES: &[(&str, &[&str])] = &[
    (
        "perf-core",
        &[
            "builder", "context", "control", "core", "event", "group", "handle", "inherit", "limits", "lock",
            "lost", "open", "output", "overflow", "read", "schedule", "sideband", "slices", "software",
            "switch", "the root", "time",
        ],
    ),
    ("vpmu", &["amd", "cpuid", "events", "intel", "model", "vendor"]),
];

/// A crate of the workspace: where it is and what it depends on, tests and builds apart.
struct Package {
    source: PathBuf,
    dependencies: BTreeSet<String>,
}

fn packages() -> BTreeMap<String, Package> {
    let metadata = cargo_metadata(&["--no-deps"]);
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages
        .map(|package| {
            let manifest = PathBuf::from(text(&package["manifest_path"]));
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            let package_of = Package {
                source: manifest.parent().unwrap().join("src"),
                dependencies: dependencies
                    .filter(|dependency| dependency["kind"].is_null())
                    .map(|dependency| text(&dependency["name"]))
                    .collect(),
            };
            (text(&package["name"]), package_of)
        })
        .collect()
}

#[test]
fn crates_depend_on_lower_ones_only() {
    let packages = packages();
    for (at, (name, allowed)) in MAY_DEPEND_ON.iter().enumerate() {
        for lower in *allowed {
            let below = MAY_DEPEND_ON[..at].iter().any(|(other, _)| other == lower);
            assert!(
                below || *lower == "guest-images",
                "{name} may depend on {lower}, which is not below it"
            );
        }
        let package = packages
            .get(*name)
            .unwrap_or_else(|| panic!("{name} is no crate any more"));
        let upward: Vec<_> = package
            .dependencies
            .iter()
            .filter(|dependency| {
                packages.contains_key(*dependency) && !allowed.contains(&dependency.as_str())
            })
            .collect();
        assert!(
            upward.is_empty(),
            "{name} depends on {upward:?}: is that an upward edge? See {}",
            file!()
        );
    }
    for (name, package) in &packages {
        let product = package.source.starts_with(workspace().join("vmm"));
        let known = MAY_DEPEND_ON.iter().any(|(other, _)| other == name);
        assert!(
            !product || known,
            "the crate {name} has no place among the layers yet: see {}",
            file!()
        );
    }
    for (dependency, user) in ONE_USER {
        for (name, _) in MAY_DEPEND_ON.iter().filter(|(name, _)| name != user) {
            assert!(
                !packages[*name].dependencies.contains(*dependency),
                "{name} depends on {dependency}, which {user} has for itself"
            );
        }
    }
}

/// Which modules at the top of a crate import which; `the root` is lib.rs or main.rs itself.
type Imports = BTreeMap<String, BTreeSet<String>>;

const ROOT: &str = "the root";

#[test]
fn modules_of_a_crate_import_each_other_one_way() {
    let packages = packages();
    for (name, _) in MAY_DEPEND_ON {
        let imports = imports(&packages[*name].source);
        assert!(imports.len() > 1, "{name}: no imports were read");
        let known = KNOWN_CYCLES
            .iter()
            .find(|(of, _)| of == name)
            .map_or(&[][..], |(_, known)| known);
        let new: Vec<_> = cycles(&imports)
            .into_iter()
            .filter(|cycle| !cycle.iter().all(|module| known.contains(&module.as_str())))
            .map(|cycle| edges_within(&imports, &cycle))
            .collect();
        assert!(
            new.is_empty(),
            "{name}: modules import each other in a circle: {new:#?}"
        );
    }
}

/// The test sees an edge that is planted, in each form that an import has, and none in comments and tests.
#[test]
fn a_planted_edge_is_seen() {
    let lib = "pub mod a;\nmod b;\nmod c;\npub use a::Shown;\n";
    let read = |b: &str, c: &str| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("c")).unwrap();
        for (file, text) in [
            ("lib.rs", lib),
            ("a.rs", "use crate::b::X;\n"),
            ("b.rs", b),
            ("c/mod.rs", c),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        cycles(&imports(dir.path()))
    };
    assert!(read("use std::fmt;\n", "use crate::{a::Y, b};\n").is_empty());
    let both = [BTreeSet::from(["a".to_owned(), "b".to_owned()])];
    for upward in [
        "use crate::a::Y;\n",
        "use crate::{self, a};\n",
        "use super::a::Y;\n",
        "fn f() -> crate::a::Y { todo() }\n",
        "use crate::Shown;\n",
    ] {
        assert_eq!(read(upward, ""), both, "{upward}");
    }
    for harmless in [
        "// use crate::a::Y;\n",
        "/// [`crate::a::Y`]\nfn f() {}\n",
        "#[cfg(test)]\nmod tests {\n    use crate::a::Y;\n    fn f() { { } }\n}\n",
        "const C: &str = \"crate::a::Y\";\n",
    ] {
        assert!(read(harmless, "").is_empty(), "{harmless}");
    }
    // By way of a third, and out of a module below it.
    let three = ["a", "b", "c"].map(str::to_owned);
    assert_eq!(
        read("use crate::c::Z;\n", "use super::a::Y;\n"),
        [BTreeSet::from(three)]
    );
}

fn imports(source: &Path) -> Imports {
    let root = ["lib.rs", "main.rs"]
        .map(|name| source.join(name))
        .into_iter()
        .find(|path| path.is_file())
        .unwrap();
    let root_text = code(&std::fs::read_to_string(&root).unwrap());
    let modules: BTreeSet<String> = root_text
        .split("mod ")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(';')?.0.to_owned()))
        .filter(|name| name.chars().all(is_name))
        .collect();
    // Names that the root shows of a module.
    let mut shown = BTreeMap::new();
    for rest in root_text.split("pub use ").skip(1) {
        let statement = rest.split(';').next().unwrap_or_default();
        let statement = statement.trim_start_matches("crate::");
        if let Some((module, names)) = statement.split_once("::")
            && modules.contains(module)
        {
            for name in names.split(|c| !is_name(c)).filter(|name| !name.is_empty()) {
                shown.insert(name.to_owned(), module.to_owned());
            }
        }
    }
    let mut imports = Imports::new();
    let mut files = vec![(source.to_owned(), Vec::new())];
    while let Some((path, parts)) = files.pop() {
        for entry in std::fs::read_dir(&path).unwrap() {
            let path = entry.unwrap().path();
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            let mut parts: Vec<String> = parts.clone();
            if path.is_dir() {
                parts.push(stem);
                files.push((path, parts));
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs") || stem == "tests" || stem == "testing" {
                continue;
            }
            let is_root = path == root;
            if !is_root && stem != "mod" {
                parts.push(stem);
            }
            let of = if is_root {
                ROOT.to_owned()
            } else {
                parts[0].clone()
            };
            let text = code(&std::fs::read_to_string(&path).unwrap());
            let targets = imports.entry(of.clone()).or_default();
            let up = "super::".repeat(parts.len());
            for name in paths(&text, "crate::").into_iter().chain(paths(&text, &up)) {
                let target = match shown.get(&name) {
                    _ if modules.contains(&name) => name,
                    Some(module) => module.clone(),
                    None if name == "self" => continue,
                    None => ROOT.to_owned(),
                };
                targets.insert(target);
            }
            if is_root {
                for module in &modules {
                    let path = format!("{module}::");
                    if !paths(&text.replace("pub use ", "pub_use@"), &path).is_empty() {
                        targets.insert(module.clone());
                    }
                }
            }
            targets.remove(&of);
        }
    }
    imports
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The first names behind `prefix` wherever it begins a path.
fn paths(text: &str, prefix: &str) -> Vec<String> {
    let mut names = Vec::new();
    if prefix.is_empty() {
        return names;
    }
    for (at, _) in text.match_indices(prefix) {
        if text[..at]
            .chars()
            .next_back()
            .is_some_and(|c| is_name(c) || matches!(c, ':' | '$' | '@'))
        {
            continue;
        }
        let rest = &text[at + prefix.len()..];
        let name = |part: &str| -> String { part.trim_start().chars().take_while(|c| is_name(*c)).collect() };
        match rest.strip_prefix('{') {
            None => names.push(name(rest)),
            Some(list) => {
                let (mut depth, mut start) = (1, 0);
                for (i, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' => depth -= 1,
                        _ => {}
                    }
                    if depth == 0 || depth == 1 && c == ',' {
                        names.push(name(&list[start..i]));
                        start = i + 1;
                    }
                    if depth == 0 {
                        break;
                    }
                }
            }
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Source without comments, strings and modules of tests.
fn code(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '/' if chars.peek() == Some(&'/') => {
                chars.by_ref().find(|c| *c == '\n');
                out.push('\n');
            }
            '"' if out.ends_with("r#") => {
                while let Some(c) = chars.next() {
                    if c == '"' && chars.peek() == Some(&'#') {
                        break;
                    }
                }
            }
            '"' => {
                while let Some(c) = chars.next() {
                    match c {
                        '\\' => drop(chars.next()),
                        '"' => break,
                        _ => {}
                    }
                }
            }
            // Characters in which a quote or a brace would count.
            '\'' => {
                let ahead: String = chars.clone().take(3).collect();
                for (form, skip) in [("\"'", 2), ("{'", 2), ("}'", 2), ("\\\"'", 3), ("\\''", 3)] {
                    if ahead.starts_with(form) {
                        chars.by_ref().take(skip).for_each(drop);
                    }
                }
            }
            c => out.push(c),
        }
    }
    while let Some(at) = out.find("#[cfg(test)]") {
        let rest = &out[at..];
        // Up to the end of what it stands before: a block or a statement.
        let (mut depth, mut end) = (0, rest.len());
        for (i, c) in rest.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 && matches!(c, '}' | ';') {
                end = i + 1;
                break;
            }
        }
        out.replace_range(at..at + end, "");
    }
    out
}

/// Modules that reach each other, in groups.
fn cycles(imports: &Imports) -> Vec<BTreeSet<String>> {
    let reach = |from: &str| {
        let mut seen = BTreeSet::new();
        let mut todo = vec![from.to_owned()];
        while let Some(module) = todo.pop() {
            for next in imports.get(&module).into_iter().flatten() {
                if seen.insert(next.clone()) {
                    todo.push(next.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<String>> = imports
        .keys()
        .map(|module| (module.as_str(), reach(module)))
        .collect();
    let mut found = BTreeSet::new();
    for (module, reaches) in &reached {
        let with: BTreeSet<String> = reaches
            .iter()
            .filter(|other| {
                reached
                    .get(other.as_str())
                    .is_some_and(|back| back.contains(*module))
            })
            .cloned()
            .collect();
        if with.len() > 1 {
            found.insert(with);
        }
    }
    found.into_iter().collect()
}

fn edges_within(imports: &Imports, cycle: &BTreeSet<String>) -> Vec<String> {
    cycle
        .iter()
        .flat_map(|from| {
            imports[from]
                .intersection(cycle)
                .map(move |to| format!("{from} -> {to}"))
        })
        .collect()
}
