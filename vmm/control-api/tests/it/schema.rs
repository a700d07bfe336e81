//! Tests that the published schema describes version 1 of the protocol.

use std::collections::BTreeSet;

use serde_json::Value;

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/reference/control-schema.json"
);

/// The documented schema equals the schema generated from the types. A change of the protocol is
/// therefore noticed.
#[test]
fn documented_schema_matches_types() {
    let page: Value = serde_json::from_str(&std::fs::read_to_string(PAGE).unwrap()).unwrap();
    assert_eq!(
        page,
        control_api::schema(),
        "cargo run -p control-api --example schema >docs/reference/control-schema.json"
    );
}

#[test]
fn each_call_has_its_result() {
    let schema = control_api::schema();
    let results: BTreeSet<&str> = schema["results"]
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    let mut calls = BTreeSet::new();
    collect_calls(&schema["$defs"]["RequestLine"], &mut calls);
    assert!(calls.len() > 20, "{calls:?}");
    assert_eq!(calls, results);
}

/// Adds each constant value that `schema` permits for a member `call` to `calls`.
fn collect_calls<'a>(schema: &'a Value, calls: &mut BTreeSet<&'a str>) {
    match schema {
        Value::Object(object) => {
            if let Some(name) = object.get("call").and_then(|call| call["const"].as_str()) {
                calls.insert(name);
            }
            object.values().for_each(|value| collect_calls(value, calls));
        }
        Value::Array(list) => list.iter().for_each(|value| collect_calls(value, calls)),
        _ => {}
    }
}

/// Every reference resolves to a type of the schema, as code generators require.
#[test]
fn schema_references_resolve() {
    fn references<'a>(schema: &'a Value, found: &mut Vec<&'a str>) {
        match schema {
            Value::Object(object) => {
                found.extend(object.get("$ref").and_then(Value::as_str));
                object.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let schema = control_api::schema();
    let mut found = Vec::new();
    references(&schema, &mut found);
    assert!(found.len() > 20, "{found:?}");
    for reference in found {
        let name = reference
            .strip_prefix("#/$defs/")
            .unwrap_or_else(|| panic!("{reference}"));
        assert!(schema["$defs"][name].is_object(), "{reference}");
    }
}
