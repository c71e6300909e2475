//! Converts the tools of this API to the functions of a chat.

use std::collections::{HashMap, HashSet};

use forebay_engine::conversation::ToolChoice;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::ask::tool_choice;

/// The client's name of a function, with its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub namespace: Option<String>,
    pub name: String,
}

impl Name {
    pub fn new(namespace: Option<&str>, name: &str) -> Name {
        Name { namespace: namespace.map(str::to_owned), name: name.to_owned() }
    }

    /// The model's name of the function. Chat templates have no namespaces.
    pub fn for_model(&self) -> String {
        match &self.namespace {
            None => self.name.clone(),
            Some(namespace) => format!("{}__{}", namespace.trim_end_matches("__"), self.name),
        }
    }
}

/// The functions that a model may call.
#[derive(Debug, Default)]
pub struct Tools {
    /// In the form of a chat, with the model's names.
    pub functions: Vec<Value>,
    /// The client's names, by the model's names.
    pub names: HashMap<String, Name>,
}

impl Tools {
    /// Parses a list of functions and of namespaces of functions.
    pub fn read(tools: &[Value]) -> Result<Tools, ApiError> {
        let mut read = Tools::default();
        for (i, tool) in tools.iter().enumerate() {
            let place = format!("tools[{i}]");
            match kind(tool) {
                "function" => read.add(&place, None, tool)?,
                "namespace" => read.add_namespace(&place, tool)?,
                other => return Err(unsupported(&place, other)),
            }
        }
        Ok(read)
    }

    /// Parses the choice of tools, and removes tools that it does not allow.
    pub fn choose(&mut self, choice: Option<&Value>) -> Result<ToolChoice, ApiError> {
        let Some(choice @ Value::Object(_)) = choice else { return Ok(tool_choice(choice)?) };
        let Tools { functions, names } = self;
        let is_in = |references: &References, function: &Value| {
            names.get(name_of(function)).is_some_and(|name| references.hold(name))
        };
        if kind(choice) != "allowed_tools" {
            let named = tool_choice(Some(choice))?;
            let references = References::read([choice]);
            // A function without a namespace takes precedence.
            let in_namespace = |function: &&Value| names[name_of(function)].namespace.is_some();
            let found =
                functions.iter().filter(|function| is_in(&references, function)).min_by_key(in_namespace);
            return Ok(found.map_or(named, |function| ToolChoice::Named(name_of(function).to_owned())));
        }
        let allowed = References::read(choice["tools"].as_array().into_iter().flatten());
        functions.retain(|function| is_in(&allowed, function));
        Ok(tool_choice(choice.get("mode"))?)
    }

    fn add_namespace(&mut self, place: &str, tool: &Value) -> Result<(), ApiError> {
        let namespace = required_name(place, tool)?;
        let Some(tools) = tool.get("tools").and_then(Value::as_array) else {
            return Err(ApiError::invalid(format!("{place}.tools"), "the namespace has no tools"));
        };
        let first = self.functions.len();
        for (i, tool) in tools.iter().enumerate() {
            let place = format!("{place}.tools[{i}]");
            if kind(tool) != "function" {
                return Err(unsupported(&place, kind(tool)));
            }
            self.add(&place, Some(namespace), tool)?;
        }
        // The description of the namespace appears only once.
        let about = tool.get("description").and_then(Value::as_str).filter(|about| !about.is_empty());
        if let (Some(about), Some(function)) = (about, self.functions.get_mut(first)) {
            let description = &mut function["function"]["description"];
            let own = description.as_str().map_or(String::new(), |own| format!("{own}\n\n"));
            *description = format!("{own}All functions of {namespace}: {about}").into();
        }
        Ok(())
    }

    fn add(&mut self, place: &str, namespace: Option<&str>, tool: &Value) -> Result<(), ApiError> {
        let name = Name::new(namespace, required_name(place, tool)?);
        let for_model = name.for_model();
        let mut function = json!({ "name": for_model });
        for field in ["description", "parameters"] {
            if let Some(value) = tool.get(field).filter(|value| !value.is_null()) {
                function[field] = value.clone();
            }
        }
        if let Some(other) = self.names.insert(for_model.clone(), name.clone()).filter(|other| *other != name)
        {
            let message = format!(
                "{:?} in namespace {:?} and {:?} in namespace {:?} would have the same name {for_model}: rename one of them",
                other.name, other.namespace, name.name, name.namespace
            );
            return Err(ApiError::invalid(format!("{place}.name"), message));
        }
        self.functions.push(json!({ "type": "function", "function": function }));
        Ok(())
    }
}

/// The functions that a choice refers to, by their own names.
struct References<'a> {
    names: HashSet<&'a str>,
    /// Functions with their namespaces.
    spaced: HashSet<(&'a str, &'a str)>,
    /// Namespaces of which all functions are meant.
    namespaces: HashSet<&'a str>,
}

impl<'a> References<'a> {
    fn read(references: impl IntoIterator<Item = &'a Value>) -> References<'a> {
        let mut read =
            References { names: HashSet::new(), spaced: HashSet::new(), namespaces: HashSet::new() };
        for reference in references {
            let field = |field: &str| reference.get(field).and_then(Value::as_str);
            let Some(name) = field("name") else { continue };
            match (kind(reference), field("namespace")) {
                ("namespace", _) => read.namespaces.insert(name),
                (_, Some(namespace)) => read.spaced.insert((namespace, name)),
                (_, None) => read.names.insert(name),
            };
        }
        read
    }

    fn hold(&self, Name { namespace, name }: &Name) -> bool {
        let in_namespace = |namespace: &str| {
            self.namespaces.contains(namespace) || self.spaced.contains(&(namespace, name.as_str()))
        };
        self.names.contains(name.as_str()) || namespace.as_deref().is_some_and(in_namespace)
    }
}

fn kind(tool: &Value) -> &str {
    tool.get("type").and_then(Value::as_str).unwrap_or("function")
}

fn name_of(function: &Value) -> &str {
    function["function"]["name"].as_str().unwrap_or_default()
}

fn required_name<'a>(place: &str, tool: &'a Value) -> Result<&'a str, ApiError> {
    let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
    name.ok_or_else(|| ApiError::invalid(format!("{place}.name"), "the tool has no name"))
}

fn unsupported(place: &str, kind: &str) -> ApiError {
    // Codex sends this tool by default.
    let hint = if kind == "web_search" { " (in Codex: web_search = \"disabled\")" } else { "" };
    let message =
        format!("only functions and namespaces of functions are supported, not tools of type {kind}{hint}");
    ApiError::invalid(format!("{place}.type"), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str) -> Value {
        json!({ "type": "function", "name": name, "parameters": {}, "strict": true })
    }

    fn weather() -> Value {
        json!({ "type": "namespace", "name": "mcp__weather", "description": "Of a day.",
            "tools": [function("forecast"), function("report")] })
    }

    fn names(tools: &Tools) -> Vec<&str> {
        tools.functions.iter().map(name_of).collect()
    }

    #[test]
    fn functions_of_namespaces_are_told_apart_by_their_names() {
        let tools = Tools::read(&[function("forecast"), weather()]).unwrap();
        assert_eq!(names(&tools), ["forecast", "mcp__weather__forecast", "mcp__weather__report"]);
        assert_eq!(
            tools.functions[0],
            json!({ "type": "function", "function": { "name": "forecast", "parameters": {} } })
        );
        assert_eq!(tools.functions[1]["function"]["description"], "All functions of mcp__weather: Of a day.");
        assert_eq!(tools.functions[2]["function"].get("description"), None);
        assert_eq!(tools.names["mcp__weather__report"], Name::new(Some("mcp__weather"), "report"));
        assert_eq!(tools.names["forecast"], Name::new(None, "forecast"));
        assert_eq!(Name::new(Some("mcp__weather__"), "f").for_model(), "mcp__weather__f");
    }

    #[test]
    fn choices_name_functions_and_namespaces() {
        let choose = |choice: Value| {
            let mut tools = Tools::read(&[function("a"), weather()]).unwrap();
            let choice = tools.choose(Some(&choice)).unwrap();
            (choice, names(&tools).join(" "))
        };
        let all = "a mcp__weather__forecast mcp__weather__report";
        assert_eq!(choose(json!("required")), (ToolChoice::Required, all.into()));
        for choice in [
            json!({ "type": "function", "name": "report" }),
            json!({ "type": "function", "name": "report", "namespace": "mcp__weather" }),
        ] {
            assert_eq!(choose(choice), (ToolChoice::Named("mcp__weather__report".into()), all.into()));
        }
        let mut same = Tools::read(&[weather(), function("report")]).unwrap();
        let plain = same.choose(Some(&json!({ "type": "function", "name": "report" }))).unwrap();
        assert_eq!(plain, ToolChoice::Named("report".into()));
        // That there is none is found out later, as in a chat.
        let named = |name: &str| ToolChoice::Named(name.into());
        assert_eq!(choose(json!({ "type": "function", "name": "b" })).0, named("b"));
        let allow = |tool: Value| choose(json!({ "type": "allowed_tools", "mode": "auto", "tools": [tool] }));
        assert_eq!(allow(json!({ "type": "function", "name": "a" })), (ToolChoice::Auto, "a".into()));
        assert_eq!(allow(json!({ "type": "namespace", "name": "mcp__weather" })).1, all[2..]);
        assert_eq!(allow(json!({ "type": "function", "name": "report" })).1, "mcp__weather__report");
    }

    #[test]
    fn what_is_no_function_is_refused_with_its_place() {
        let spaced = |tools: Value| json!({ "type": "namespace", "name": "n", "tools": tools });
        for (tools, param) in [
            (vec![json!({ "type": "web_search" })], "tools[0].type"),
            (vec![json!({ "type": "custom", "name": "apply_patch" })], "tools[0].type"),
            (vec![json!({})], "tools[0].name"),
            (vec![function("a"), json!({ "type": "namespace", "tools": [] })], "tools[1].name"),
            (vec![json!({ "type": "namespace", "name": "n" })], "tools[0].tools"),
            (vec![spaced(json!([function("a"), { "type": "custom" }]))], "tools[0].tools[1].type"),
            (vec![spaced(json!([{ "type": "function" }]))], "tools[0].tools[0].name"),
            (vec![function("n__a"), spaced(json!([function("a")]))], "tools[1].tools[0].name"),
        ] {
            let error = Tools::read(&tools).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{tools:?}");
        }
        // The same one twice is one.
        assert!(Tools::read(&[function("a"), function("a")]).is_ok());
    }
}
