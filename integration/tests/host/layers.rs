//! Tests the layers of the source code: the graph of crates in docs/architecture.md is up to date,
//! and the top-level modules of a crate do not import each other in a cycle.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::artefacts::{cargo_metadata, workspace};

/// External crates with restricted use, each with the names of the workspace crates that may use
/// it.
const USERS: &[(&str, &[&str])] = &[
    ("kvm-ioctls", &["vmm"]),
    ("kvm-bindings", &["vmm"]),
    ("linux-loader", &["vmm"]),
    ("vm-superio", &["vmm"]),
    ("virtio-queue", &["virtio-devices"]),
    ("clap", &["operator", "perfvisor"]),
    ("smoltcp", &["mmds"]),
    ("ratatui", &["operator"]),
    ("linux-perf-data", &["guest-profile"]),
];

/// Layers of perf-core, lowest first. A layer may import lower layers, and modules that belong to
/// no layer.
const PERF_CORE_LAYERS: &[&str] = &["model", "schedule", "context", "service", "api"];

/// Returns the source folder and the normal dependencies of each of the product's crates, by name.
fn packages() -> BTreeMap<String, (PathBuf, BTreeSet<String>)> {
    let metadata = cargo_metadata(&["--no-deps"]);
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let mut packages = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let folder = manifest.parent().unwrap();
        let of_product = |top: &&str| folder.starts_with(workspace().join(top));
        if ["vmm", "vpmu", "perf-core", "diagnostics"].iter().any(of_product) {
            let dependencies = package["dependencies"].as_array().unwrap().iter();
            let normal = dependencies.filter(|dependency| dependency["kind"].is_null());
            let names = normal.map(|dependency| text(&dependency["name"])).collect();
            packages.insert(text(&package["name"]), (folder.join("src"), names));
        }
    }
    packages
}

/// The graph in docs/architecture.md contains every dependency between crates. A new dependency
/// therefore requires a change to the graph.
#[test]
fn crate_graph_is_current() {
    let script = workspace().join("integration/crate-graph.sh");
    let output = Command::new("sh").arg(script).output().unwrap();
    let graph = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(graph.lines().count() > 10, "{errors}");
    let page = fs::read_to_string(workspace().join("docs/architecture.md")).unwrap();
    let expected = format!("```mermaid\n{graph}```\n");
    assert!(
        page.contains(&expected),
        "put this into docs/architecture.md (make graph):\n{expected}"
    );
}

#[test]
fn external_crates_have_their_users_only() {
    for (name, (_, dependencies)) in packages() {
        for (external, users) in USERS {
            assert!(
                users.contains(&name.as_str()) || !dependencies.contains(*external),
                "{name} depends on {external}, which only {users:?} may use"
            );
        }
    }
}

/// The imports of a crate: for each top-level module, the top-level modules whose `crate::` paths
/// it uses.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Calls `each` for each source file below `folder`. The arguments are the name of the top-level
/// module and the code without tests and comments. The module is `module`, or named after the file
/// or folder if `module` is `None`.
fn read_modules(folder: &Path, module: Option<&str>, each: &mut impl FnMut(&str, &str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let module = module.unwrap_or(&stem);
        // Test code may import anything.
        if ["tests", "testing"].contains(&stem.as_str()) {
            continue;
        }
        if path.is_dir() {
            read_modules(&path, Some(module), each);
        } else if path.extension().is_some_and(|e| e == "rs") && !["lib", "main"].contains(&module) {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap().lines();
            let code: Vec<_> = code.filter(|line| !line.trim_start().starts_with("//")).collect();
            each(module, &code.join("\n"));
        }
    }
}

fn imports(source: &Path) -> Imports {
    let mut imports = Imports::new();
    read_modules(source, None, &mut |module, code| {
        let names = code.split("crate::").skip(1).map(|rest| {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
            rest[..end.unwrap_or(rest.len())].to_owned()
        });
        imports.entry(module.to_owned()).or_default().extend(names);
    });
    let modules: BTreeSet<String> = imports.keys().cloned().collect();
    for (module, targets) in &mut imports {
        targets.retain(|target| target != module && modules.contains(target));
    }
    imports
}

#[test]
fn modules_import_each_other_without_cycles() {
    for (name, (source, _)) in packages() {
        let mut imports = imports(&source);
        let edges: usize = imports.values().map(BTreeSet::len).sum();
        assert!(edges > 0 || imports.len() < 5, "{name}: no imports were read");
        while let Some((leaf, _)) = imports.iter().find(|(_, targets)| targets.is_empty()) {
            let leaf = leaf.clone();
            imports.remove(&leaf);
            imports.values_mut().for_each(|targets| _ = targets.remove(&leaf));
        }
        assert!(imports.is_empty(), "{name}: cycle among {:?}", imports.keys());
    }
}

#[test]
fn layers_of_perf_core_import_lower_layers_only() {
    let imports = imports(&packages()["perf-core"].0);
    let layer = |module: &str| PERF_CORE_LAYERS.iter().position(|l| *l == module);
    assert!(PERF_CORE_LAYERS.iter().all(|name| imports.contains_key(*name)));
    for (module, targets) in &imports {
        let upward = targets.iter().find(|target| layer(target) > layer(module));
        assert_eq!(upward, None, "perf-core: {module} imports a layer above it");
    }
}

/// Modules that run on vCPU threads do not import the types of the control protocol. Only the
/// module `control` converts between protocol types and the VMM's own types.
#[test]
fn vcpu_threads_do_not_import_wire_types() {
    read_modules(&packages()["vmm"].0, None, &mut |module, code| {
        let forbidden = ["pmu", "vcpu"].contains(&module) && code.contains("control_api");
        assert!(!forbidden, "vmm: {module} imports control_api");
    });
}
