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
    ("sandbox", &[]),
    ("control-api", &["perf-core", "sandbox"]),
    ("virtio-devices", &["perf-core", "sandbox"]),
    ("guest-agent", &[]),
    (
        "vmm",
        &[
            "control-api",
            "guest-profile",
            "kernel-images",
            "perf-core",
            "sandbox",
            "virtio-devices",
            "vpmu",
        ],
    ),
    ("validate", &["control-api", "perf-core", "vpmu"]),
    (
        "perfvisor",
        &[
            "control-api",
            "guest-agent",
            "guest-images",
            "guest-profile",
            "kernel-images",
            "perf-core",
            "sandbox",
            "validate",
            "virtio-devices",
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
    ("virtio-queue", "virtio-devices"),
    ("clap", "perfvisor"),
    ("ratatui", "perfvisor"),
    ("linux-perf-data", "guest-profile"),
];

/// Crates whose files import each other one way, and not only the modules at their top: all of them.
const FILES_ONE_WAY: &[&str] = &[
    "perf-core",
    "vpmu",
    "kernel-images",
    "guest-agent",
    "guest-profile",
    "control-api",
    "validate",
    "sandbox",
    "virtio-devices",
    "vmm",
    "perfvisor",
    "integration",
    "guest-images",
];

/// The layers of perf-core, the lowest first. Each may import those before it, and the modules that are none
/// of them: attributes, drivers, rings, records and the like, which import no layer.
const PERF_CORE_LAYERS: &[&str] = &["model", "schedule", "context", "service", "api"];

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
        let circles: Vec<_> = cycles(&imports)
            .iter()
            .map(|cycle| edges_within(&imports, cycle))
            .collect();
        assert!(
            circles.is_empty(),
            "{name}: modules import each other in a circle: {circles:#?}"
        );
    }
}

#[test]
fn files_import_each_other_one_way() {
    let packages = packages();
    for name in FILES_ONE_WAY {
        let imports = file_imports(&packages[*name].source);
        assert!(imports.len() > 2, "{name}: files were not read");
        let circles: Vec<_> = cycles(&imports)
            .iter()
            .map(|cycle| edges_within(&imports, cycle))
            .collect();
        assert!(
            circles.is_empty(),
            "{name}: files import each other in a circle: {circles:#?}"
        );
    }
}

#[test]
fn the_layers_of_perf_core_import_lower_ones_only() {
    let imports = imports(&packages()["perf-core"].source);
    let layer = |module: &str| PERF_CORE_LAYERS.iter().position(|l| *l == module);
    for name in PERF_CORE_LAYERS {
        assert!(imports.contains_key(*name), "perf-core has no layer {name}");
    }
    // The root shows what callers see.
    for (module, targets) in imports.iter().filter(|(module, _)| *module != ROOT) {
        for target in targets {
            assert!(
                layer(target) <= layer(module),
                "perf-core: {module} imports {target}, which is above it"
            );
        }
    }
}

/// A circle among files of one folder is seen, by way of a name that the folder shows, too.
#[test]
fn a_planted_circle_of_files_is_seen() {
    let read = |x: &str, y: &str| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("f")).unwrap();
        for (file, text) in [
            ("lib.rs", "mod f;\n"),
            (
                "f/mod.rs",
                "mod x;\nmod y;\npub(crate) use x::Shown;\nstruct Own;\n",
            ),
            ("f/x.rs", x),
            ("f/y.rs", y),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        cycles(&file_imports(dir.path()))
    };
    let circle = [BTreeSet::from(["f::x".to_owned(), "f::y".to_owned()])];
    for back in [
        "use crate::f::x::Hidden;\n",
        "use super::{Own, x};\n",
        "use crate::f::{Own, Shown};\n",
        "fn f(x: super::Shown) {}\n",
    ] {
        assert_eq!(read("use super::y::Y;\n", back), circle, "{back}");
        assert!(read("use super::Own;\n", back).is_empty(), "{back}");
    }
    assert!(read("use super::y::Y;\n", "use super::Own;\nuse std::fmt;\n").is_empty());
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
        "#[cfg(all(test, unix))]\nmod tests {\n    use crate::a::Y;\n}\n",
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

/// Which files of a crate import which, each called by its module; what a module only shows of one below it
/// is that one's.
fn file_imports(source: &Path) -> Imports {
    let mut texts: BTreeMap<Vec<String>, String> = BTreeMap::new();
    let mut folders = vec![source.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
            if path.extension().is_none_or(|e| e != "rs") || stem == "tests" || stem == "testing" {
                continue;
            }
            let parent = path.parent().unwrap().strip_prefix(source).unwrap();
            let mut module: Vec<String> = parent.iter().map(|p| p.to_string_lossy().into_owned()).collect();
            if !matches!(stem.as_str(), "mod" | "lib" | "main") {
                module.push(stem);
            }
            texts.insert(module, code(&std::fs::read_to_string(&path).unwrap()));
        }
    }
    // What each file names, and whether it only shows that.
    let mut named: BTreeMap<&Vec<String>, Vec<(Vec<String>, bool)>> = BTreeMap::new();
    for (module, text) in &texts {
        let mut rest = text.clone();
        let mut names = Vec::new();
        for (at, _) in text.match_indices("use ") {
            let before = text[..at].trim_end_matches(' ');
            if before.ends_with(is_name) && !before.ends_with("pub") {
                continue;
            }
            let statement = text[at + 4..].split(';').next().unwrap_or_default();
            let shows = before.ends_with("pub") || before.ends_with(')');
            names.extend(expand(statement).into_iter().map(|path| (path, shows)));
            rest = rest.replacen(statement, "", 1);
        }
        // Modules right below this one are named without more ado.
        let below = texts.keys().filter_map(|other| match other.split_last() {
            Some((name, above)) if above == module.as_slice() => Some(format!("{name}::")),
            _ => None,
        });
        for prefix in ["crate::", "super::"].map(str::to_owned).into_iter().chain(below) {
            for (at, _) in rest.match_indices(&prefix) {
                // `pub(in super::super)` says who sees a thing and imports nothing.
                let before = &rest[..at];
                if !before.ends_with(|c: char| is_name(c) || matches!(c, ':' | '$'))
                    && !before.ends_with("(in ")
                {
                    let path: String = rest[at..]
                        .chars()
                        .take_while(|c| is_name(*c) || *c == ':')
                        .collect();
                    names.push((path.split("::").map(str::to_owned).collect(), false));
                }
            }
        }
        let absolute = |(mut path, shows): (Vec<String>, bool)| {
            let mut base = match path[0].as_str() {
                "crate" => Vec::new(),
                "self" | "super" => module.clone(),
                // A module below this one, or another crate.
                first => {
                    let mut below = module.clone();
                    below.push(first.to_owned());
                    texts.contains_key(&below).then_some(())?;
                    path.insert(0, "self".to_owned());
                    module.clone()
                }
            };
            let ups = path.iter().take_while(|p| *p == "super").count();
            base.truncate(base.len().checked_sub(ups)?);
            base.extend(path.into_iter().skip(ups.max(1)));
            Some((base, shows))
        };
        named.insert(module, names.into_iter().filter_map(absolute).collect());
    }
    // Where the path `names` leads: to the module itself, or to the one that it shows the name of.
    let lead = |names: &[String]| {
        let mut names = names.to_vec();
        for _ in 0..8 {
            let at = (0..=names.len())
                .rev()
                .find(|n| texts.contains_key(&names[..*n]))
                .unwrap_or(0);
            let shown = names.get(at).and_then(|name| {
                let shown = named[&names[..at].to_vec()].iter();
                shown
                    .filter(|(_, shows)| *shows)
                    .find(|(path, _)| path.last() == Some(name))
            });
            match shown {
                Some((path, _)) => names = path.clone(),
                None => return names[..at].to_vec(),
            }
        }
        names
    };
    let name = |module: &[String]| match module {
        [] => ROOT.to_owned(),
        parts => parts.join("::"),
    };
    named
        .iter()
        .map(|(module, names)| {
            let targets = names
                .iter()
                .filter(|(_, shows)| !shows)
                .map(|(path, _)| lead(path));
            let targets = targets
                .filter(|target| target != *module)
                .map(|target| name(&target));
            (name(module), targets.collect())
        })
        .collect()
}

/// The paths of a `use` statement's tree.
fn expand(tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    let Some((head, list)) = tree.split_once('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        return vec![path.split("::").map(|name| name.trim().to_owned()).collect()];
    };
    let list = list.trim_end().strip_suffix('}').unwrap_or(list);
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (i, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    let full = parts.iter().filter(|part| !part.trim().is_empty());
    full.flat_map(|part| expand(&format!("{head}{}", part.trim())))
        .collect()
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
    while let Some(at) = ["#[cfg(test)]", "#[cfg(all(test,"]
        .iter()
        .filter_map(|tests| out.find(tests))
        .min()
    {
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
