//! Configurations of client programs for a server.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde_json::{Value, json};

/// A client whose configuration can be printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// opencode
    Opencode,
    /// Claude Code
    ClaudeCode,
    /// Codex
    Codex,
    /// Continue
    Continue,
    /// Open WebUI
    OpenWebui,
    /// Aider
    Aider,
}

/// The facts that go into a configuration.
pub struct Facts {
    /// The address that the server listens at.
    pub host: IpAddr,
    /// Its port.
    pub port: u16,
    /// The name of the model for clients.
    pub model: String,
    /// Context length in tokens.
    pub context: usize,
    /// Maximum tokens of an answer, if there is a limit.
    pub max_tokens: Option<usize>,
    /// Whether requests need an API key.
    pub needs_key: bool,
}

/// Configuration for a client.
#[derive(Debug, PartialEq, Eq)]
pub struct Configuration {
    /// The file or place for it.
    pub place: &'static str,
    /// What to write there.
    pub text: String,
}

impl Client {
    /// All of them.
    pub const ALL: [Client; 6] = [
        Client::Opencode,
        Client::ClaudeCode,
        Client::Codex,
        Client::Continue,
        Client::OpenWebui,
        Client::Aider,
    ];

    /// The name in a command line.
    pub fn name(self) -> &'static str {
        match self {
            Client::Opencode => "opencode",
            Client::ClaudeCode => "claude-code",
            Client::Codex => "codex",
            Client::Continue => "continue",
            Client::OpenWebui => "open-webui",
            Client::Aider => "aider",
        }
    }

    /// The configuration for a server.
    pub fn configuration(self, facts: &Facts) -> Configuration {
        let (place, text) = match self {
            Client::Opencode => {
                ("opencode.json in a project, or ~/.config/opencode/opencode.json", opencode(facts))
            }
            Client::ClaudeCode => {
                (".claude/settings.json in a project, or ~/.claude/settings.json", claude_code(facts))
            }
            Client::Codex => ("~/.codex/config.toml", codex(facts)),
            Client::Continue => ("~/.continue/config.yaml", continue_dev(facts)),
            Client::OpenWebui => ("the environment of Open WebUI", open_webui(facts)),
            Client::Aider => ("~/.aider.conf.yml, or .aider.conf.yml in a project", aider(facts)),
        };
        Configuration { place, text }
    }
}

impl Facts {
    /// The address of the server for programs on this machine.
    fn address(&self) -> String {
        let host = match self.host {
            // The server listens at all addresses, including this one.
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => "127.0.0.1".into(),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => "[::1]".into(),
            IpAddr::V4(host) => host.to_string(),
            IpAddr::V6(host) => format!("[{host}]"),
        };
        format!("http://{host}:{}", self.port)
    }

    fn openai(&self) -> String {
        format!("{}/v1", self.address())
    }

    /// Most clients require a key, even if the server has none.
    fn key(&self) -> &'static str {
        if self.needs_key { "YOUR-KEY" } else { "none" }
    }

    /// Maximum tokens of an answer, for clients that require a number.
    fn output(&self) -> usize {
        self.max_tokens.unwrap_or(usize::MAX).min(self.context / 4).max(1)
    }
}

/// A quoted text that is valid in JSON, YAML and TOML.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

fn opencode(facts: &Facts) -> String {
    let limit = json!({ "context": facts.context, "output": facts.output() });
    let model = json!({ "name": facts.model, "tool_call": true, "limit": limit });
    pretty(&json!({
        "$schema": "https://opencode.ai/config.json",
        "model": format!("forebay/{}", facts.model),
        "small_model": format!("forebay/{}", facts.model),
        "provider": {
            "forebay": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Forebay",
                "options": { "baseURL": facts.openai(), "apiKey": facts.key() },
                "models": { facts.model.as_str(): model },
            },
        },
    }))
}

fn claude_code(facts: &Facts) -> String {
    let model = facts.model.as_str();
    pretty(&json!({
        "env": {
            "ANTHROPIC_BASE_URL": facts.address(),
            "ANTHROPIC_AUTH_TOKEN": facts.key(),
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_SUBAGENT_MODEL": model,
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": facts.context.to_string(),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": facts.output().to_string(),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": "3600000",
        },
    }))
}

fn codex(facts: &Facts) -> String {
    let (model, address) = (quoted(&facts.model), quoted(&facts.openai()));
    let (context, compact) = (facts.context, facts.context - facts.output());
    let key = if facts.needs_key { "env_key = \"FOREBAY_API_KEY\"\n" } else { "" };
    format!(
        "model = {model}\n\
         model_provider = \"forebay\"\n\
         model_context_window = {context}\n\
         model_auto_compact_token_limit = {compact}\n\
         web_search = \"disabled\"\n\
         \n\
         [model_providers.forebay]\n\
         name = \"Forebay\"\n\
         base_url = {address}\n\
         wire_api = \"responses\"\n\
         {key}\
         stream_idle_timeout_ms = 3600000\n"
    )
}

fn continue_dev(facts: &Facts) -> String {
    let (model, address, key) = (quoted(&facts.model), quoted(&facts.openai()), quoted(facts.key()));
    let (context, output) = (facts.context, facts.output());
    format!(
        "name: Forebay\n\
         version: 1.0.0\n\
         schema: v1\n\
         models:\n\
         \x20 - name: {model}\n\
         \x20   provider: openai\n\
         \x20   model: {model}\n\
         \x20   apiBase: {address}\n\
         \x20   apiKey: {key}\n\
         \x20   roles: [chat, edit, apply, summarize]\n\
         \x20   capabilities: [tool_use]\n\
         \x20   defaultCompletionOptions:\n\
         \x20     contextLength: {context}\n\
         \x20     maxTokens: {output}\n"
    )
}

fn open_webui(facts: &Facts) -> String {
    let lines = [
        ("OPENAI_API_BASE_URL", facts.openai()),
        ("OPENAI_API_KEY", facts.key().to_owned()),
        ("DEFAULT_MODELS", facts.model.clone()),
        ("ENABLE_OLLAMA_API", "false".to_owned()),
    ];
    lines.into_iter().map(|(name, value)| format!("{name}={}\n", quoted(&value))).collect()
}

fn aider(facts: &Facts) -> String {
    let (model, address, key) =
        (quoted(&format!("openai/{}", facts.model)), quoted(&facts.openai()), quoted(facts.key()));
    // From this number of tokens on, Aider summarises the history.
    let history = facts.context / 2;
    format!(
        "model: {model}\n\
         weak-model: {model}\n\
         openai-api-base: {address}\n\
         openai-api-key: {key}\n\
         max-chat-history-tokens: {history}\n\
         show-model-warnings: false\n\
         timeout: 3600\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        let host = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let model = "owner/\"odd\":Q4".to_owned();
        Facts { host, port: 9000, model, context: 32768, max_tokens: None, needs_key: true }
    }

    #[test]
    fn every_client_is_told_address_and_model() {
        for client in Client::ALL {
            let text = client.configuration(&facts()).text;
            assert!(text.contains("http://127.0.0.1:9000"), "{client:?}: {text}");
            assert!(text.contains("owner/\\\"odd\\\":Q4"), "{client:?}: {text}");
            assert!(text.contains("YOUR-KEY") || text.contains("FOREBAY_API_KEY"), "{client:?}: {text}");
            let open = client.configuration(&Facts { needs_key: false, ..facts() }).text;
            assert!(!open.contains("YOUR-KEY") && !open.contains("FOREBAY_API_KEY"), "{client:?}: {open}");
        }
    }

    #[test]
    fn what_is_json_or_toml_parses() {
        let text = |client: Client| client.configuration(&facts()).text;
        let opencode: Value = serde_json::from_str(&text(Client::Opencode)).unwrap();
        assert_eq!(opencode["provider"]["forebay"]["models"]["owner/\"odd\":Q4"]["limit"]["context"], 32768);
        let claude: Value = serde_json::from_str(&text(Client::ClaudeCode)).unwrap();
        assert_eq!(claude["env"]["ANTHROPIC_BASE_URL"], "http://127.0.0.1:9000");
        let codex = text(Client::Codex);
        let keys = toml::de::DeTable::parse(&codex).unwrap();
        let has = |key: &str| keys.get_ref().iter().any(|(name, _)| name.get_ref() == key);
        assert!(has("model_providers") && has("model_context_window"), "{codex}");
        assert!(codex.contains("wire_api = \"responses\""), "{codex}");
    }

    #[test]
    fn addresses_are_those_that_clients_can_use() {
        let address = |host: &str| Facts { host: host.parse().unwrap(), ..facts() }.address();
        assert_eq!(address("192.168.0.2"), "http://192.168.0.2:9000");
        assert_eq!(address("::"), "http://[::1]:9000");
        assert_eq!(address("fe80::1"), "http://[fe80::1]:9000");
    }
}
