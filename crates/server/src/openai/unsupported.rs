//! Unsupported fields of other servers and of newer versions of the APIs that would change the answer.

use super::fields::{Said, Unsupported};

const FALSE: &[Said<'static>] = &[Said::Bool(false)];
const TRUE: &[Said<'static>] = &[Said::Bool(true)];
const EMPTY: &[Said<'static>] = &[Said::Empty];
const ZERO: &[Said<'static>] = &[Said::Number(0.0)];
const ONE: &[Said<'static>] = &[Said::Number(1.0)];
const OFF: &[Said<'static>] = &[Said::Number(-1.0), Said::Number(0.0)];

/// Fields of chats and completions.
pub const CHAT: &[Unsupported] = &[
    no("suffix", EMPTY, "text is only generated after the prompt"),
    no("functions", &[], "use tools"),
    no("function_call", &[], "use tool_choice"),
    no("audio", &[], "the model generates only text"),
    no("prediction", &[], "predicted outputs are not supported"),
    no("web_search_options", &[], "the server has no web search"),
    no("moderation", &[], "the server does not moderate answers"),
    no("thinking", &[], "use reasoning_effort or chat_template_kwargs"),
    no("reasoning", &[], "use reasoning_effort and thinking_budget"),
    no("enable_thinking", &[], "use chat_template_kwargs: {\"enable_thinking\": …}"),
];

/// Fields that clients send in any API: those of llama.cpp's server, vLLM and SGLang.
pub const ANY: &[Unsupported] = &[
    // The format of the answer.
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
    // Sampling.
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
    no("lora", EMPTY, "the server loads no adapters"),
    no("random_seed", &[], "use seed"),
    // The end of the answer.
    no("min_tokens", ZERO, "use ignore_eos with max_tokens"),
    no("n_indent", ZERO, "use stop"),
    no("n_cmpl", ONE, "use n"),
    no("t_max_predict_ms", OFF, "the server's option ServerOptions::timeout limits the time of answers"),
    no("t_max_prompt_ms", OFF, "the server's option ServerOptions::timeout limits the time of answers"),
    no("stop_token_ids", EMPTY, "use stop"),
    no("include_stop_str_in_output", FALSE, "a stop text is never part of the answer"),
    // The prompt.
    no("chat_template", EMPTY, "the server has one template: set it with Prompter::with_template"),
    no("documents", EMPTY, "put documents into a message or into chat_template_kwargs"),
    no("truncate_prompt_tokens", &[], "a prompt that is too long is refused, never truncated"),
    no("cache_salt", EMPTY, "requests cannot choose their prefix cache"),
    // The fields of the answer.
    no("reasoning_format", &[Said::Text("auto"), Said::Text("deepseek")], REASONING),
    no("separate_reasoning", TRUE, REASONING),
    no("include_reasoning", TRUE, REASONING),
    no("reasoning_budget_message", EMPTY, "the text that ends reasoning is fixed for each model family"),
    no("skip_special_tokens", TRUE, "answers never contain control tokens"),
    no("preserved_tokens", EMPTY, "answers never contain control tokens"),
    no("n_probs", ZERO, "use logprobs"),
    no("post_sampling_probs", FALSE, "logprobs are reported from before sampling"),
    no("prompt_logprobs", FALSE, "logprobs of the prompt are not supported"),
    no("return_tokens", FALSE, IDS),
    no("return_token_ids", FALSE, IDS),
    no("return_tokens_as_token_ids", FALSE, IDS),
    no("response_fields", EMPTY, "answers always have all fields"),
];

/// Fields of chats that all APIs understand under the same name. OpenAI's Responses and Anthropic's Messages document only few of
/// them.
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
const SAMPLERS: &str = "this sampler does not exist here";
const REASONING: &str = "reasoning is always separate from the answer";
const IDS: &str = "answers are text; /tokenize returns the tokens of a text";

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
