//! Calls in Gemma 4's notation, as grammars.

use serde_json::{Value, json};

use super::super::gemma::{CALL, CLOSE, OPEN, QUOTE};
use super::super::values::quoted;
use super::{Grammar, with_definitions};

/// How deep a schema of Gemma 4's arguments is followed. Values below may have any type.
const MOST_NESTED: usize = 8;

/// The most items of a list that its grammar counts.
const MOST_COUNTED: u64 = 1000;

impl Grammar<'_> {
    pub(super) fn gemma_call(&mut self, name: &str, schema: &Value) -> String {
        let [open, close] = [OPEN, CLOSE].map(|tag| self.tag(tag));
        let arguments = self.gemma_object(schema, schema, MOST_NESTED);
        format!("{open} {} {arguments} {close}", quoted(&format!("{CALL}{name}")))
    }

    /// An object in Gemma 4's notation.
    fn gemma_object(&mut self, schema: &Value, root: &Value, depth: usize) -> String {
        if schema.is_object() && schema.get("properties").is_none() {
            let any = self.gemma_any();
            return gemma_any_object(&any);
        }
        let items = self.items(schema, ",", "}", |grammar, name, property| {
            let value = grammar.gemma_value(property, root, depth);
            format!("{} {value}", quoted(&format!("{name}:")))
        });
        format!("\"{{\" {items}")
    }

    /// A value in Gemma 4's notation. Of a string's schema, only its choices count.
    fn gemma_value(&mut self, schema: &Value, root: &Value, depth: usize) -> String {
        let quote = self.tag(QUOTE);
        let Some(depth) = depth.checked_sub(1) else { return self.gemma_any() };
        let constant = schema.get("const").map(std::slice::from_ref);
        let choices = schema.get("enum").and_then(Value::as_array).map(Vec::as_slice).or(constant);
        if let Some(choices) = choices.filter(|choices| !choices.is_empty()) {
            let choice = |value: &Value| match value {
                Value::String(text) => Some(format!("{quote} {} {quote}", quoted(text))),
                Value::Array(_) | Value::Object(_) => None,
                other => Some(quoted(&other.to_string())),
            };
            let choices: Option<Vec<String>> = choices.iter().map(choice).collect();
            return choices.map_or_else(|| self.gemma_any(), |choices| format!("({})", choices.join(" | ")));
        }
        let reference = schema.get("$ref").and_then(Value::as_str).and_then(|place| place.strip_prefix('#'));
        if let Some(target) = reference.and_then(|place| root.pointer(place)) {
            return self.gemma_value(target, root, depth);
        }
        let members = ["anyOf", "oneOf"].into_iter().find_map(|key| schema.get(key)?.as_array());
        if let Some(members) = members.filter(|members| !members.is_empty()) {
            let members: Vec<String> =
                members.iter().map(|member| self.gemma_value(member, root, depth)).collect();
            return format!("({})", members.join(" | "));
        }
        match schema.get("type") {
            Some(Value::Array(types)) if !types.is_empty() => {
                let types: Vec<String> = types
                    .iter()
                    .map(|kind| {
                        let mut one = schema.clone();
                        one["type"] = kind.clone();
                        self.gemma_value(&one, root, depth)
                    })
                    .collect();
                format!("({})", types.join(" | "))
            }
            Some(Value::String(kind)) => match &**kind {
                "string" => {
                    let text = self.until(QUOTE);
                    format!("{quote} {text}")
                }
                "array" => self.gemma_list(schema, root, depth),
                "object" => self.gemma_object(schema, root, depth),
                _ => self.json(&with_definitions(schema, root)),
            },
            _ => self.gemma_any(),
        }
    }

    /// A list in Gemma 4's notation.
    fn gemma_list(&mut self, schema: &Value, root: &Value, depth: usize) -> String {
        let count = |key: &str| schema.get(key).and_then(Value::as_u64);
        let (least, most) = (count("minItems").unwrap_or(0), count("maxItems"));
        if most == Some(0) {
            return quoted("[]");
        }
        let item = self.gemma_value(schema.get("items").unwrap_or(&Value::Null), root, depth);
        let item = self.rule(&item);
        let others = least.saturating_sub(1);
        let more = match most.map(|most| most - 1).filter(|&most| most <= MOST_COUNTED) {
            Some(0) => String::new(),
            Some(most) => format!("(\",\" {item}){{{others},{most}}}"),
            None => format!("(\",\" {item}){{{others},}}"),
        };
        let needed = if least == 0 { "?" } else { "" };
        format!("\"[\" ({item} {more}){needed} \"]\"")
    }

    /// Any value in Gemma 4's notation.
    fn gemma_any(&mut self) -> String {
        let quote = self.tag(QUOTE);
        let text = self.until(QUOTE);
        let scalar = self.json(&json!({ "type": ["number", "boolean", "null"] }));
        // The rule refers to itself.
        let any = format!("r{}", self.count);
        let object = gemma_any_object(&any);
        self.rule(&format!("{quote} {text} | {scalar} | \"[\" ({any} (\",\" {any})*)? \"]\" | {object}"))
    }
}

/// An object of any values in Gemma 4's notation; `any` is the rule for a value.
fn gemma_any_object(any: &str) -> String {
    const KEY: &str = "/[A-Za-z_][A-Za-z0-9_-]{0,63}:/";
    format!("\"{{\" ({KEY} {any} (\",\" {KEY} {any})*)? \"}}\"")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::chat::dialect::Dialect;
    use crate::chat::dialect::grammar::tests::takes;
    use crate::{Engine, Options};

    #[test]
    fn arguments_of_gemma_follow_their_schema() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-qwen3moe-Q4_K_M.gguf");
        let engine = Engine::open(&model, &Options { threads: Some(1), ..Options::default() }).unwrap();
        let schema = json!({
            "type": "object",
            "properties": {
                "city": { "type": "string" },
                "kind": { "enum": ["a", 1, null] },
                "place": { "$ref": "#/$defs/place" },
                "list": { "type": "array", "items": { "type": ["integer", "null"] }, "maxItems": 3 },
                "pair": { "type": "array", "items": { "type": "boolean" }, "minItems": 2, "maxItems": 2 },
                "either": { "anyOf": [{ "const": "b" }, { "type": "boolean" }] },
                "more": {},
            },
            "required": ["city"],
            "$defs": { "place": { "type": "object", "properties": {
                "x": { "type": "number" }, "inside": { "$ref": "#/$defs/place" } } } },
        });
        let tools = [json!({ "name": "f", "parameters": schema })];
        let source = Dialect::of("<|tool_call><tool_call|><|\"|>").call_grammar("", &tools).unwrap();
        let grammar = crate::Grammar::lark(&engine, &source).unwrap();
        let takes = |arguments: &str| {
            takes(&engine, &grammar, &format!("<|tool_call>call:f{{{}", arguments.replace('\'', "<|\"|>")))
        };
        for arguments in [
            "city:'a, \"b\" }'}<tool_call|>",
            "city:'',kind:1,place:{x:1.5,inside:{inside:{x:2}}},list:[1,null,3]}<tool_call|>",
            "city:'',kind:'a',list:[],pair:[true,false],either:'b',more:{a:['x',{},[null]],b:-1.5}}<tool_call|>",
            "city:'',either:false,more:'x'}<tool_call|>",
        ] {
            assert!(takes(arguments), "{arguments}: {source}");
        }
        for arguments in [
            "}",
            "kind",
            "city:1",
            "city:'',city",
            "city:'',kind:2",
            "city:'',kind:'b",
            "city:'',place:{y",
            "city:'',list:['",
            "city:'',list:[1.",
            "city:'',list:[1,2,3,",
            "city:'',pair:[]",
            "city:'',pair:[true]",
            "city:'',either:1",
            "city:'',more:x",
            "city:''<tool",
        ] {
            assert!(!takes(arguments), "{arguments}: {source}");
        }
    }
}
