//! Tests that the published OpenAPI description matches the code.

use std::collections::BTreeSet;

use firecracker_api::openapi::openapi;
use firecracker_api::routes::ROUTES;
use serde_json::Value;

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/reference/firecracker-api.json"
);

#[test]
fn documented_description_matches_types() {
    let page: Value = serde_json::from_str(&std::fs::read_to_string(PAGE).unwrap()).unwrap();
    assert_eq!(
        page,
        openapi(),
        "cargo run -p firecracker-api --example openapi >docs/reference/firecracker-api.json"
    );
}

/// Every reference in the published OpenAPI description resolves, and every described type is used.
/// Code generators require these properties.
#[test]
fn references_and_types_match() {
    fn references<'a>(schema: &'a Value, found: &mut BTreeSet<&'a str>) {
        match schema {
            Value::Object(object) => {
                found.extend(object.get("$ref").and_then(Value::as_str));
                object.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let description = openapi();
    let mut found = BTreeSet::new();
    references(&description, &mut found);
    let types = description["components"]["schemas"].as_object().unwrap();
    let names = types.keys().map(|name| format!("#/components/schemas/{name}"));
    let names: Vec<String> = names.collect();
    let names: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(found, names);
    let methods = description["paths"].as_object().unwrap().values();
    let methods: usize = methods.map(|path| path.as_object().unwrap().len()).sum();
    assert_eq!(methods, ROUTES.len());
}
