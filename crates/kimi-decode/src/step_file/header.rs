//! Names in a safetensors header, which is a JSON object that `serde_json` reads without a word about repeated keys.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

/// The key of the header under which its metadata lies.
const METADATA: &str = "__metadata__";

/// The first name that a valid header gives to two tensors or two metadata values.
pub(super) fn named_twice(header: &[u8]) -> Option<String> {
    serde_json::from_slice::<Header>(header).ok().and_then(|header| header.named_twice)
}

/// The names of an object, as far as the first that occurs twice, and of the metadata in it.
struct Header {
    named_twice: Option<String>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Names)
    }
}

struct Names;

impl<'de> Visitor<'de> for Names {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut names = HashSet::new();
        let mut named_twice = None;
        while let Some(name) = map.next_key::<String>()? {
            let within = if name == METADATA {
                map.next_value::<Option<Header>>()?.and_then(|metadata| metadata.named_twice)
            } else {
                map.next_value::<IgnoredAny>().map(|_| None)?
            };
            // The whole object is read all the same: what is left unread is an error to serde_json.
            let repeated = names.contains(&name).then(|| name.clone());
            named_twice = named_twice.or(within).or(repeated);
            names.insert(name);
        }
        Ok(Header { named_twice })
    }
}

#[cfg(test)]
mod tests {
    use super::named_twice;

    #[test]
    fn repeated_names_are_found_in_the_header_and_its_metadata_only() {
        let found = |text: &str| named_twice(text.as_bytes());
        assert_eq!(found("{}"), None);
        assert_eq!(found(r#"{"a": {"shape": [1], "shape": [2]}, "b": 1}   "#), None);
        assert_eq!(found(r#"{"a": 1, "b": 2, "a": 3}"#).as_deref(), Some("a"));
        assert_eq!(found(r#"{"a": 1, "\u0061": 3, "b": 1, "b": 2}"#).as_deref(), Some("a"), "an escaped name");
        assert_eq!(found(r#"{"__metadata__": {"k": "1", "a": "2"}, "a": 1, "k": 1}"#), None);
        assert_eq!(found(r#"{"__metadata__": {"k": "1", "k": "2"}, "a": 1}"#).as_deref(), Some("k"));
        assert_eq!(found(r#"{"__metadata__": null, "a": 1, "a": 1}"#).as_deref(), Some("a"));
    }
}
