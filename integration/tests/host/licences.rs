//! Tests that `deny.toml` allows the licence of every dependency, and that there is one version of
//! each rust-vmm crate. Needs neither network access nor cargo-deny.

use std::collections::{BTreeMap, BTreeSet};

use integration::artefacts::{cargo_metadata, workspace};

/// Licences that `deny.toml` allows for all crates, and additional ones for individual crates.
struct AllowedLicences {
    all: BTreeSet<String>,
    exceptions: BTreeMap<String, BTreeSet<String>>,
}

impl AllowedLicences {
    fn read() -> Self {
        let text = std::fs::read_to_string(workspace().join("deny.toml")).unwrap();
        let file: toml::Table = text.parse().unwrap();
        let names = |list: &toml::Value| -> BTreeSet<String> {
            list.as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_str().unwrap().to_owned())
                .collect()
        };
        let licenses = &file["licenses"];
        let exceptions = licenses["exceptions"]
            .as_array()
            .unwrap()
            .iter()
            .map(|exception| {
                (
                    exception["crate"].as_str().unwrap().to_owned(),
                    names(&exception["allow"]),
                )
            });
        Self {
            all: names(&licenses["allow"]),
            exceptions: exceptions.collect(),
        }
    }

    fn permits(&self, name: &str, expression: &str) -> bool {
        let mut allowed = self.all.clone();
        allowed.extend(self.exceptions.get(name).into_iter().flatten().cloned());
        permitted(expression, &allowed)
    }
}

/// Returns name, version and licence of every crate built on this platform.
fn packages() -> Vec<(String, String, String)> {
    let metadata = cargo_metadata(&["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| {
            (
                text(&package["name"]),
                text(&package["version"]),
                text(&package["license"]),
            )
        })
        .collect()
}

/// Returns whether an SPDX expression is satisfied by the allowed licences.
///
/// Requires an allowed alternative in each AND term. Parentheses are ignored, so some valid
/// expressions are rejected, but no invalid one is accepted.
fn permitted(expression: &str, allowed: &BTreeSet<String>) -> bool {
    // `/` is the deprecated form of OR.
    let expression = expression.replace('/', " OR ").replace(['(', ')'], "");
    let mut terms = expression.split(" AND ");
    terms.all(|term| term.split(" OR ").any(|name| allowed.contains(name.trim())))
}

#[test]
fn every_crate_has_an_allowed_licence() {
    let allowed = AllowedLicences::read();
    let refused: Vec<_> = packages()
        .into_iter()
        .filter(|(name, _, licence)| !allowed.permits(name, licence))
        .collect();
    assert!(refused.is_empty(), "not allowed by deny.toml: {refused:?}");
}

#[test]
fn rust_vmm_crates_have_single_versions() {
    let mut versions = BTreeMap::<String, BTreeSet<String>>::new();
    for (name, version, _) in packages() {
        versions.entry(name).or_default().insert(version);
    }
    for name in [
        "kvm-bindings",
        "kvm-ioctls",
        "linux-loader",
        "vm-memory",
        "vmm-sys-util",
    ] {
        assert_eq!(versions[name].len(), 1, "{name}: {:?}", versions[name]);
    }
}

#[test]
fn licence_expressions_are_evaluated() {
    let allowed: BTreeSet<_> = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]
        .map(str::to_owned)
        .into_iter()
        .collect();
    for good in [
        "MIT",
        "GPL-3.0 OR MIT",
        "Unlicense/MIT",
        "(MIT OR GPL-3.0) AND Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
    ] {
        assert!(permitted(good, &allowed), "{good}");
    }
    for bad in [
        "",
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "(MIT OR Apache-2.0) AND GPL-3.0",
        "GPL-3.0 AND MIT OR GPL-2.0",
        "MIT MIT",
    ] {
        assert!(!permitted(bad, &allowed), "{bad}");
    }
}
