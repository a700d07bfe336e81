//! Tests that dependencies between crates, and between the top-level modules of a crate, are
//! acyclic. docs/architecture.md shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use integration::artefacts::{cargo_metadata, workspace};

/// Workspace crates that each crate of the product may depend on, lowest crate first.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("diagnostics", &[]),
    ("perf-core", &["diagnostics"]),
    ("vpmu", &["perf-core"]),
    ("kernel-images", &[]),
    ("guest-profile", &["kernel-images", "perf-core"]),
    ("sandbox", &[]),
    ("snapshot", &[]),
    ("control-api", &["perf-core", "sandbox"]),
    ("virtio-devices", &["diagnostics", "sandbox", "snapshot"]),
    ("guest-agent", &[]),
    (
        "vmm",
        &[
            "control-api",
            "guest-profile",
            "kernel-images",
            "perf-core",
            "sandbox",
            "snapshot",
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
            "snapshot",
            "validate",
            "virtio-devices",
            "vmm",
            "vpmu",
        ],
    ),
];

/// External crates that only one crate of the product may use.
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

/// Layers of perf-core, lowest first. A layer may import lower layers and modules outside the
/// layers.
const PERF_CORE_LAYERS: &[&str] = &["model", "schedule", "context", "service", "api"];

/// Source folder and normal dependencies of a workspace crate.
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
fn crates_depend_on_lower_layers_only() {
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

/// Top-level modules that each top-level module of a crate imports through `crate::` paths.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Reads the imports of the files below `folder`. The files belong to the top-level module
/// `module`, or if it is `None`, to the module named after each file or folder.
fn read_imports(folder: &Path, module: Option<&str>, imports: &mut Imports) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let module = module.unwrap_or(&stem);
        // Test code may import anything.
        if ["tests", "testing"].contains(&stem.as_str()) {
            continue;
        }
        if path.is_dir() {
            read_imports(&path, Some(module), imports);
        } else if path.extension().is_some_and(|e| e == "rs") && !["lib", "main"].contains(&module) {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
            let found = code.flat_map(|line| line.split("crate::").skip(1));
            let names = found.map(|rest| {
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                rest[..end.unwrap_or(rest.len())].to_owned()
            });
            imports.entry(module.to_owned()).or_default().extend(names);
        }
    }
}

fn imports(source: &Path) -> Imports {
    let mut imports = Imports::new();
    read_imports(source, None, &mut imports);
    let modules: BTreeSet<String> = imports.keys().cloned().collect();
    for (module, targets) in &mut imports {
        targets.retain(|target| target != module && modules.contains(target));
    }
    imports
}

/// Returns the modules on a cycle or depending on one: those left after repeatedly removing modules
/// that import no remaining one.
fn cyclic(mut imports: Imports) -> Vec<String> {
    while let Some(leaf) = imports.iter().find(|(_, targets)| targets.is_empty()) {
        let leaf = leaf.0.clone();
        imports.remove(&leaf);
        imports.values_mut().for_each(|targets| _ = targets.remove(&leaf));
    }
    imports.into_keys().collect()
}

#[test]
fn modules_import_each_other_without_cycles() {
    let packages = packages();
    for (name, _) in MAY_DEPEND_ON {
        let imports = imports(&packages[*name].source);
        let edges: usize = imports.values().map(BTreeSet::len).sum();
        assert!(edges > 0 || imports.len() < 5, "{name}: no imports were read");
        let cyclic = cyclic(imports);
        assert!(cyclic.is_empty(), "{name}: cycle among {cyclic:?}");
    }
}

#[test]
fn layers_of_perf_core_import_lower_layers_only() {
    let imports = imports(&packages()["perf-core"].source);
    let layer = |module: &str| PERF_CORE_LAYERS.iter().position(|l| *l == module);
    for name in PERF_CORE_LAYERS {
        assert!(imports.contains_key(*name), "perf-core has no layer {name}");
    }
    for (module, targets) in &imports {
        for target in targets {
            assert!(
                layer(target) <= layer(module),
                "perf-core: {module} imports {target}, which is above it"
            );
        }
    }
}

#[test]
fn module_cycle_is_detected() {
    let edge = |from: &str, to: &[&str]| (from.to_owned(), to.iter().map(ToString::to_string).collect());
    let imports: Imports = [edge("a", &["b", "c"]), edge("b", &["a"]), edge("c", &[])].into();
    assert_eq!(cyclic(imports), ["a", "b"]);
}
