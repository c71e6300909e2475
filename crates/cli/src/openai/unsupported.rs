//! Fields that other servers and newer versions of the APIs have, that would change the answer, and that are not supported.

use super::fields::{Said, Unsupported};

const FALSE: &[Said<'static>] = &[Said::Bool(false)];
const TRUE: &[Said<'static>] = &[Said::Bool(true)];
const EMPTY: &[Said<'static>] = &[Said::Empty];
const ZERO: &[Said<'static>] = &[Said::Number(0.0)];
const ONE: &[Said<'static>] = &[Said::Number(1.0)];
const OFF: &[Said<'static>] = &[Said::Number(-1.0), Said::Number(0.0)];

/// Fields of chats and of texts that are continued.
pub const CHAT: &[Unsupported] = &[
    no("suffix", EMPTY, "texts are continued at their end alone"),
    no("functions", &[], "use tools"),
    no("function_call", &[], "use tool_choice"),
    no("audio", &[], "only text is written"),
    no("prediction", &[], "predicted outputs are not supported"),
    no("web_search_options", &[], "there is no search"),
    no("moderation", &[], "answers are not moderated"),
    no("thinking", &[], "use reasoning_effort or chat_template_kwargs"),
    no("reasoning", &[], "use reasoning_effort and thinking_budget"),
    no("enable_thinking", &[], "use chat_template_kwargs: {\"enable_thinking\": …}"),
];

/// Fields that any API may be sent: those of llama.cpp's server, of vLLM and of SGLang.
pub const ANY: &[Unsupported] = &[
    // What the answer must be.
    no("grammar", EMPTY, GRAMMARS),
    no("grammar_lazy", FALSE, GRAMMARS),
    no("grammar_triggers", EMPTY, GRAMMARS),
    no("regex", EMPTY, GRAMMARS),
    no("ebnf", EMPTY, GRAMMARS),
    no("structural_tag", EMPTY, GRAMMARS),
    no("structured_outputs", EMPTY, GRAMMARS),
    no("guided_json", EMPTY, GRAMMARS),
    no("guided_regex", EMPTY, GRAMMARS),
    no("guided_choice", EMPTY, GRAMMARS),
    no("guided_grammar", EMPTY, GRAMMARS),
    // How tokens are chosen.
    no("samplers", EMPTY, "the order of the samplers is fixed"),
    no("typical_p", ONE, SAMPLERS),
    no("tfs_z", ONE, SAMPLERS),
    no("top_a", ZERO, SAMPLERS),
    no("top_n_sigma", OFF, SAMPLERS),
    no("xtc_probability", ZERO, SAMPLERS),
    no("dry_multiplier", ZERO, SAMPLERS),
    no("dynatemp_range", ZERO, SAMPLERS),
    no("mirostat", ZERO, SAMPLERS),
    no("adaptive_target", OFF, SAMPLERS),
    no("min_keep", &[Said::Number(0.0), Said::Number(1.0)], SAMPLERS),
    no("use_beam_search", FALSE, SAMPLERS),
    no("length_penalty", ONE, SAMPLERS),
    no("allowed_token_ids", EMPTY, "use logit_bias"),
    no("bad_words", EMPTY, "use logit_bias"),
    no("logits_processors", EMPTY, SAMPLERS),
    no("lora", EMPTY, "there are no adapters"),
    no("random_seed", &[], "use seed"),
    // When the answer ends.
    no("min_tokens", ZERO, "use ignore_eos with max_tokens"),
    no("n_indent", ZERO, "use stop"),
    no("n_cmpl", ONE, "use n"),
    no("t_max_predict_ms", OFF, "the server's --timeout limits answers"),
    no("t_max_prompt_ms", OFF, "the server's --timeout limits answers"),
    no("stop_token_ids", EMPTY, "use stop"),
    no("include_stop_str_in_output", FALSE, "the text that ends an answer is never part of it"),
    // What the model is given.
    no("chat_template", EMPTY, "the server has one template: start it with --chat-template-file"),
    no("documents", EMPTY, "put them into a message, or into chat_template_kwargs"),
    no("truncate_prompt_tokens", &[], "what is too long is refused, never cut"),
    no("cache_salt", EMPTY, "a request cannot have a prefix cache of its own"),
    // How the answer is told.
    no("reasoning_format", &[Said::Text("auto"), Said::Text("deepseek")], REASONING),
    no("separate_reasoning", TRUE, REASONING),
    no("include_reasoning", TRUE, REASONING),
    no("reasoning_budget_message", EMPTY, "reasoning is ended by the words of the model's family"),
    no("skip_special_tokens", TRUE, "control tokens are no part of an answer"),
    no("preserved_tokens", EMPTY, "control tokens are no part of an answer"),
    no("n_probs", ZERO, "use logprobs"),
    no("post_sampling_probs", FALSE, "probabilities are told before sampling"),
    no("prompt_logprobs", FALSE, "how likely the prompt's tokens are is not told"),
    no("return_tokens", FALSE, IDS),
    no("return_token_ids", FALSE, IDS),
    no("return_tokens_as_token_ids", FALSE, IDS),
    no("response_fields", EMPTY, "answers have all their fields"),
];

/// Fields of a chat that are understood wherever they are sent, by the same name. OpenAI's responses and Anthropic's messages
/// document few of them.
pub const ANYWHERE: [&str; 14] = [
    "seed",
    "top_k",
    "min_p",
    "repeat_penalty",
    "repetition_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "stop",
    "json_schema",
    "thinking_budget",
    "chat_template_kwargs",
];

const GRAMMARS: &str = "use response_format with a JSON schema";
const SAMPLERS: &str = "there is no such sampler here";
const REASONING: &str = "reasoning is told apart from the answer";
const IDS: &str = "answers are told as text; /tokenize gives the tokens of a text";

const fn no(name: &'static str, harmless: &'static [Said<'static>], reason: &'static str) -> Unsupported {
    Unsupported { name, harmless, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_names_every_field() {
        let documentation = include_str!("../../../../docs/server.md");
        let refused = CHAT.iter().chain(ANY).map(|field| field.name);
        for name in refused.chain(ANYWHERE) {
            assert!(documentation.contains(&format!("`{name}`")), "docs/server.md does not name {name}");
        }
    }
}
