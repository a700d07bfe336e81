//! Prints the OpenAPI description of the Firecracker-compatible API.

fn main() {
    let text = serde_json::to_string_pretty(&firecracker_api::openapi::openapi()).expect("JSON");
    println!("{text}");
}
