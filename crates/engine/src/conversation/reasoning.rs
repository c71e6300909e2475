//! The variables that turn reasoning on and off in chat templates.

use serde_json::{Map, Value};

/// The names that most templates use.
const NAMES: [&str; 2] = ["enable_thinking", "thinking"];

/// Adds the variables of this template to `kwargs`. What is there already takes precedence over `think`.
pub(super) fn set(kwargs: &mut Map<String, Value>, think: Option<bool>, template: &str) {
    if !NAMES.iter().any(|name| kwargs.contains_key(*name))
        && let Some(think) = think
    {
        kwargs.extend(NAMES.map(|name| (name.to_owned(), think.into())));
    }
    let think = NAMES.iter().find_map(|name| kwargs.get(*name)?.as_bool());
    // Hy3.
    if template.contains("'no_think'") && template.contains("reasoning_effort") {
        let asked = kwargs.get("reasoning_effort").and_then(Value::as_str);
        if let Some(effort) = effort_of_hy3(asked, think) {
            kwargs.insert("reasoning_effort".into(), effort.into());
        }
    }
    // Command A+ and North.
    if template.contains("set reasoning = reasoning")
        && let Some(think) = think
    {
        kwargs.entry("reasoning").or_insert(think.into());
    }
}

/// Hy3 has three words for the effort, and its template refuses all others.
fn effort_of_hy3(asked: Option<&str>, think: Option<bool>) -> Option<&'static str> {
    Some(match (asked, think) {
        (None, None) => return None,
        (_, Some(false)) | (Some("none" | "no_think"), _) => "no_think",
        (Some("minimal" | "low"), _) => "low",
        (_, Some(true)) | (Some(_), None) => "high",
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The variables for a template, if the request has these and this setting.
    fn variables(template: &str, kwargs: Value, think: Option<bool>) -> Value {
        let mut kwargs = kwargs.as_object().cloned().unwrap();
        set(&mut kwargs, think, template);
        kwargs.into()
    }

    #[test]
    fn the_request_takes_precedence() {
        assert_eq!(variables("", json!({}), None), json!({}));
        let on = json!({ "enable_thinking": true, "thinking": true });
        assert_eq!(variables("", json!({}), Some(true)), on);
        let off = json!({ "thinking": false });
        assert_eq!(variables("", off.clone(), Some(true)), off);
    }

    #[test]
    fn hy3_gets_words_that_it_knows() {
        let hy3 = "reasoning_effort not in ['high', 'low', 'no_think']";
        let effort = |kwargs, think| variables(hy3, kwargs, think)["reasoning_effort"].clone();
        assert_eq!(effort(json!({}), None), Value::Null);
        assert_eq!(effort(json!({}), Some(true)), "high");
        assert_eq!(effort(json!({}), Some(false)), "no_think");
        assert_eq!(effort(json!({ "enable_thinking": false, "reasoning_effort": "none" }), None), "no_think");
        for (asked, effort_of_model) in [
            ("medium", "high"),
            ("xhigh", "high"),
            ("minimal", "low"),
            ("low", "low"),
            ("no_think", "no_think"),
        ] {
            assert_eq!(effort(json!({ "reasoning_effort": asked }), None), effort_of_model, "{asked}");
        }
        // Other templates get the effort as it is.
        let other = variables("reasoning_effort", json!({ "reasoning_effort": "medium" }), Some(false));
        assert_eq!(other["reasoning_effort"], "medium");
    }

    #[test]
    fn command_a_has_a_name_of_its_own() {
        let template = "{%- set reasoning = reasoning if reasoning is not undefined else true -%}";
        assert_eq!(variables(template, json!({}), Some(false))["reasoning"], false);
        assert_eq!(variables(template, json!({ "reasoning": true }), Some(false))["reasoning"], true);
        assert_eq!(variables(template, json!({}), None), json!({}));
    }
}
