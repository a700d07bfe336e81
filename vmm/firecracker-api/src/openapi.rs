//! The OpenAPI description of the supported API, generated from the table of routes and the types.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use crate::API_VERSION;
use crate::routes::{ROUTES, Route};
use crate::types::{
    Action, ApiVersion, Balloon, BalloonStats, BalloonStatsUpdate, BalloonUpdate, BootSource, Drive,
    DriveUpdate, EntropyDevice, FaultBody, InstanceInfo, Logger, MachineConfig, MachineConfigUpdate, Metrics,
    MmdsConfig, MmdsContents, NetworkInterface, NetworkInterfaceUpdate, Pmu, SerialDevice,
    SnapshotCreateParams, SnapshotLoadParams, VmConfig, VmUpdate, Vsock,
};

/// Returns the OpenAPI 3.1 description of the supported API.
pub fn openapi() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    let mut generator = settings.into_generator();
    add_types(&mut generator);
    let mut paths = Map::new();
    for route in ROUTES {
        let of_path = paths.entry(route.path).or_insert_with(|| json!({}));
        if let Some(methods) = of_path.as_object_mut() {
            methods.insert(route.method.name().to_ascii_lowercase(), operation(route));
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Firecracker's API as served by Perfvisor",
            "version": API_VERSION,
        },
        "paths": paths,
        "components": { "schemas": generator.take_definitions(true) },
    })
}

fn add_types(generator: &mut SchemaGenerator) {
    generator.subschema_for::<InstanceInfo>();
    generator.subschema_for::<ApiVersion>();
    generator.subschema_for::<FaultBody>();
    generator.subschema_for::<MachineConfig>();
    generator.subschema_for::<MachineConfigUpdate>();
    generator.subschema_for::<BootSource>();
    generator.subschema_for::<Drive>();
    generator.subschema_for::<DriveUpdate>();
    generator.subschema_for::<NetworkInterface>();
    generator.subschema_for::<NetworkInterfaceUpdate>();
    generator.subschema_for::<Vsock>();
    generator.subschema_for::<EntropyDevice>();
    generator.subschema_for::<Balloon>();
    generator.subschema_for::<BalloonUpdate>();
    generator.subschema_for::<BalloonStats>();
    generator.subschema_for::<BalloonStatsUpdate>();
    generator.subschema_for::<MmdsConfig>();
    generator.subschema_for::<MmdsContents>();
    generator.subschema_for::<SerialDevice>();
    generator.subschema_for::<Logger>();
    generator.subschema_for::<Metrics>();
    generator.subschema_for::<Pmu>();
    generator.subschema_for::<Action>();
    generator.subschema_for::<VmUpdate>();
    generator.subschema_for::<SnapshotCreateParams>();
    generator.subschema_for::<SnapshotLoadParams>();
    generator.subschema_for::<VmConfig>();
}

/// Returns the OpenAPI description of a JSON body of type `name`.
fn content(name: &str) -> Value {
    let reference = format!("#/components/schemas/{name}");
    json!({ "application/json": { "schema": { "$ref": reference } } })
}

fn operation(route: &Route) -> Value {
    let success = match route.response {
        Some(name) => (
            "200",
            json!({ "description": "Success", "content": content(name) }),
        ),
        None => ("204", json!({ "description": "Success" })),
    };
    let fault = json!({ "description": "Refused", "content": content("FaultBody") });
    let mut operation = json!({
        "summary": route.summary,
        "responses": { success.0: success.1, "400": fault },
    });
    if let Some(name) = route.request {
        operation["requestBody"] = json!({ "required": true, "content": content(name) });
    }
    let parameter = route
        .path
        .split_once('{')
        .and_then(|(_, rest)| rest.strip_suffix('}'));
    if let Some(name) = parameter {
        let parameter =
            json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } });
        operation["parameters"] = json!([parameter]);
    }
    operation
}
