// Logits by llama.cpp of all positions, computed in f32 from a GGUF file. tiny_families.py compiles and calls it.

#include <stdlib.h>
#include "llama.h"

// Returns how many positions were computed: all of them, or 0 after an error, which llama.cpp prints.
int llama_logits(const char *path, const int32_t *tokens, int count, int vocab, float *logits) {
    int computed = 0;
    struct llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    model_params.use_extra_bufts = false;
    struct llama_model *model = llama_model_load_from_file(path, model_params);
    if (!model) return 0;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = params.n_ubatch = count;
    params.n_threads = params.n_threads_batch = 1;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    struct llama_context *context = llama_init_from_model(model, params);
    if (context && llama_vocab_n_tokens(llama_model_get_vocab(model)) == vocab) {
        struct llama_batch batch = llama_batch_init(count, 0, 1);
        batch.n_tokens = count;
        for (int i = 0; i < count; i++) {
            batch.token[i] = tokens[i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch) == 0) {
            for (computed = 0; computed < count; computed++) {
                const float *row = llama_get_logits_ith(context, computed);
                for (int i = 0; i < vocab; i++) logits[computed * vocab + i] = row[i];
            }
        }
        llama_batch_free(batch);
    }
    if (context) llama_free(context);
    llama_model_free(model);
    return computed;
}
