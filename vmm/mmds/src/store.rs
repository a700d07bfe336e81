//! The document of the metadata service.

use serde_json::{Map, Value};

/// Maximum nesting depth of a document and of a patch. The limit is lower than the depth of 127
/// that the parsers of messages with a document accept.
pub const MAX_DEPTH: usize = 100;

/// Error returned when an operation on the document fails. The messages are the same as in
/// Firecracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataStoreError {
    /// The document would exceed the size limit.
    #[error("The MMDS patch request doesn't fit.")]
    TooLarge,
    /// The document or patch is nested too deeply.
    #[error("The MMDS data is nested more than {MAX_DEPTH} levels deep.")]
    TooDeep,
    /// There is no document to patch.
    #[error("The MMDS data store is not initialized.")]
    NotInitialized,
    /// The document has no value at the path.
    #[error("The MMDS resource does not exist.")]
    NotFound,
    /// The value at the path is neither an object nor a string, and cannot be returned as text.
    #[error("Cannot retrieve value. The value has an unsupported type.")]
    UnsupportedType,
}

/// Format in which a value of the document is returned to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataValueFormat {
    /// JSON text.
    Json,
    /// Text. For a string, the string itself. For an object, its keys, one per line, with a slash
    /// after each key whose value is an object.
    Imds,
}

/// A JSON document with a size limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetadataStore {
    /// The document; `None` before the first [`MetadataStore::put`].
    data: Option<Value>,
    size_limit: usize,
}

impl MetadataStore {
    /// Creates a store without a document. `size_limit` is the maximum size of a document as JSON
    /// text, in bytes.
    pub fn new(size_limit: usize) -> Self {
        Self {
            data: None,
            size_limit,
        }
    }

    /// Returns the document, or `null` if there is none.
    pub fn get(&self) -> &Value {
        self.data.as_ref().unwrap_or(&Value::Null)
    }

    /// Returns whether there is a document.
    pub fn is_initialized(&self) -> bool {
        self.data.is_some()
    }

    /// Replaces the document.
    ///
    /// # Errors
    /// Returns the errors of [`check_data`] with the size limit.
    pub fn put(&mut self, data: Value) -> Result<(), MetadataStoreError> {
        check_data(&data, self.size_limit)?;
        self.data = Some(data);
        Ok(())
    }

    /// Applies a merge patch (RFC 7396) to the document. If an error is returned, the document is
    /// unchanged.
    ///
    /// # Errors
    /// Returns [`MetadataStoreError::NotInitialized`] if there is no document, and the errors of
    /// [`MetadataStore::put`] if the patched document is not valid.
    pub fn patch(&mut self, patch: Value) -> Result<(), MetadataStoreError> {
        let mut patched = self.data.clone().ok_or(MetadataStoreError::NotInitialized)?;
        merge(&mut patched, patch);
        self.put(patched)
    }

    /// Returns the value at `path` (a JSON pointer, RFC 6901) as text. Repeated slashes count as
    /// one, and a trailing slash is ignored.
    ///
    /// # Errors
    /// Returns [`MetadataStoreError::NotFound`] if there is no such value, and
    /// [`MetadataStoreError::UnsupportedType`] if `format` cannot represent it.
    pub fn read(&self, path: &str, format: MetadataValueFormat) -> Result<String, MetadataStoreError> {
        let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty()).collect();
        let pointer: String = words.iter().flat_map(|word| ["/", word]).collect();
        let value = self.data.as_ref().and_then(|data| data.pointer(&pointer));
        let value = value.ok_or(MetadataStoreError::NotFound)?;
        match (format, value) {
            (MetadataValueFormat::Json, value) => Ok(value.to_string()),
            (MetadataValueFormat::Imds, Value::String(text)) => Ok(text.clone()),
            (MetadataValueFormat::Imds, Value::Object(object)) => Ok(keys(object)),
            (MetadataValueFormat::Imds, _) => Err(MetadataStoreError::UnsupportedType),
        }
    }
}

/// Checks the size and depth of a document or patch. `size_limit` is the maximum size as JSON text,
/// in bytes.
///
/// # Errors
/// Returns [`MetadataStoreError::TooLarge`] or [`MetadataStoreError::TooDeep`].
pub fn check_data(data: &Value, size_limit: usize) -> Result<(), MetadataStoreError> {
    if data.to_string().len() > size_limit {
        return Err(MetadataStoreError::TooLarge);
    }
    if exceeds_depth(data, MAX_DEPTH) {
        return Err(MetadataStoreError::TooDeep);
    }
    Ok(())
}

/// Returns whether `data` has more than `depth` levels of arrays and objects.
fn exceeds_depth(data: &Value, depth: usize) -> bool {
    let mut level = vec![data];
    for _ in 0..depth {
        level = level.into_iter().flat_map(children).collect();
    }
    level.iter().any(|value| value.is_array() || value.is_object())
}

fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Array(elements) => elements.iter().collect(),
        Value::Object(fields) => fields.values().collect(),
        _ => Vec::new(),
    }
}

fn keys(object: &Map<String, Value>) -> String {
    let line = |(key, value): (&String, &Value)| {
        let slash = if value.is_object() { "/" } else { "" };
        format!("{key}{slash}")
    };
    object.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Applies the merge patch `patch` to `target`. The recursion is bounded, because the parser of
/// `patch` limits its depth.
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(object) = target.as_object_mut() else {
        return;
    };
    for (key, value) in patch {
        if value.is_null() {
            object.remove(&key);
        } else {
            merge(object.entry(key).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn merged(mut target: Value, patch: Value) -> Value {
        merge(&mut target, patch);
        target
    }

    /// Merge patches produce the results given in the examples of RFC 7396, appendix A.
    #[test]
    fn merge_patch_follows_rfc_7396() {
        for (target, patch, result) in [
            (json!({"a":"b"}), json!({"a":"c"}), json!({"a":"c"})),
            (json!({"a":"b"}), json!({"b":"c"}), json!({"a":"b","b":"c"})),
            (json!({"a":"b"}), json!({"a":null}), json!({})),
            (json!({"a":"b","b":"c"}), json!({"a":null}), json!({"b":"c"})),
            (json!({"a":["b"]}), json!({"a":"c"}), json!({"a":"c"})),
            (json!({"a":"c"}), json!({"a":["b"]}), json!({"a":["b"]})),
            (
                json!({"a":{"b":"c"}}),
                json!({"a":{"b":"d","c":null}}),
                json!({"a":{"b":"d"}}),
            ),
            (json!({"a":[{"b":"c"}]}), json!({"a":[1]}), json!({"a":[1]})),
            (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
            (json!({"a":"b"}), json!(["c"]), json!(["c"])),
            (json!({"a":"foo"}), json!(null), json!(null)),
            (json!({"a":"foo"}), json!("bar"), json!("bar")),
            (json!({"e":null}), json!({"a":1}), json!({"e":null,"a":1})),
            (json!([1, 2]), json!({"a":"b","c":null}), json!({"a":"b"})),
            (
                json!({}),
                json!({"a":{"bb":{"ccc":null}}}),
                json!({"a":{"bb":{}}}),
            ),
        ] {
            assert_eq!(merged(target.clone(), patch.clone()), result, "{target} {patch}");
        }
    }

    #[test]
    fn values_are_formatted_as_by_firecracker() {
        let mut store = MetadataStore::new(1000);
        assert_eq!(store.get(), &Value::Null);
        assert_eq!(
            store.read("/", MetadataValueFormat::Json),
            Err(MetadataStoreError::NotFound)
        );
        let data = json!({"name": {"first": "a\"b", "age": 4, "more": {}}, "x/y": "z"});
        store.put(data).unwrap();
        let imds = |path| store.read(path, MetadataValueFormat::Imds);
        assert_eq!(imds("/").unwrap(), "name/\nx/y");
        assert_eq!(imds("//name/").unwrap(), "age\nfirst\nmore/");
        assert_eq!(imds("/name/first").unwrap(), "a\"b");
        assert_eq!(imds("/x~1y").unwrap(), "z");
        assert_eq!(imds("/name/more").unwrap(), "");
        assert_eq!(imds("/name/age"), Err(MetadataStoreError::UnsupportedType));
        assert_eq!(imds("/name/none"), Err(MetadataStoreError::NotFound));
        assert_eq!(
            store.read("/name/first", MetadataValueFormat::Json).unwrap(),
            "\"a\\\"b\""
        );
        assert_eq!(store.read("/name/age", MetadataValueFormat::Json).unwrap(), "4");
    }

    #[test]
    fn size_limit_holds_for_documents_and_patches() {
        let mut store = MetadataStore::new(10);
        assert_eq!(store.patch(json!({})), Err(MetadataStoreError::NotInitialized));
        assert_eq!(store.put(json!({"a":"bcd"})), Err(MetadataStoreError::TooLarge));
        assert!(!store.is_initialized());
        store.put(json!({"a":"bc"})).unwrap();
        assert_eq!(store.patch(json!({"b":1})), Err(MetadataStoreError::TooLarge));
        assert_eq!(store.get(), &json!({"a":"bc"}));
        store.patch(json!({"b":1,"a":null})).unwrap();
        assert_eq!(store.get(), &json!({"b":1}));
    }

    #[test]
    fn deep_documents_are_refused() {
        let nested = |levels| (0..levels).fold(json!(1), |inner, _| json!([inner]));
        let mut store = MetadataStore::new(usize::MAX);
        assert_eq!(store.put(nested(MAX_DEPTH + 1)), Err(MetadataStoreError::TooDeep));
        store.put(nested(MAX_DEPTH)).unwrap();
        assert_eq!(
            store.patch(json!({"a": nested(MAX_DEPTH)})),
            Err(MetadataStoreError::TooDeep)
        );
    }

    fn document() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            "[ -~]{0,5}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 30, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map("[a-c]", inner, 0..4)
                    .prop_map(|of| Value::Object(of.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn merge_is_idempotent(target in document(), patch in document()) {
            let once = merged(target, patch.clone());
            prop_assert_eq!(merged(once.clone(), patch), once);
        }

        #[test]
        fn no_path_makes_read_panic(data in document(), path in "[/a-c~0-2]{0,12}") {
            let mut store = MetadataStore::new(usize::MAX);
            store.put(data).unwrap();
            let _ = store.read(&path, MetadataValueFormat::Imds);
            let _ = store.read(&path, MetadataValueFormat::Json);
        }
    }
}
