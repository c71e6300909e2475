// Translates what macros cannot: declarations of shared memory, which become addresses in the block's memory; machine
// instructions, which become calls of functions in ptx.h; and kernels, which are listed for the driver.

#include "translate.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <vector>

namespace emulator {

namespace {

bool in_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

std::string trim(const std::string& text) {
    size_t first = text.find_first_not_of(" \t\n\\"), last = text.find_last_not_of(" \t\n\\");
    return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

struct Translator {
    const std::string& in;
    const std::string& file;
    std::string out, kernels;
    size_t at = 0;
    unsigned counter = 0;

    [[noreturn]] void fail(const std::string& why) {
        size_t line = 1;
        for (size_t i = 0; i < at; i++) line += in[i] == '\n';
        throw std::runtime_error(file + "(" + std::to_string(line) + "): error: the emulator " + why);
    }

    // The end of a comment or a literal that begins at `i`, or `i`.
    size_t skip_opaque(size_t i) {
        if (in.compare(i, 2, "//") == 0) return std::min(in.find('\n', i), in.size());
        if (in.compare(i, 2, "/*") == 0) return std::min(in.find("*/", i), in.size() - 2) + 2;
        if (in[i] != '"' && in[i] != '\'') return i;
        size_t end = i + 1;
        while (end < in.size() && in[end] != in[i]) end += in[end] == '\\' ? 2 : 1;
        return end + 1;
    }

    size_t skip_space(size_t i) {
        for (;;) {
            while (i < in.size() && isspace((unsigned char)in[i])) i++;
            size_t end = i < in.size() && in[i] == '/' ? skip_opaque(i) : i;
            if (end == i) return i;
            i = end;
        }
    }

    std::string word(size_t i) {
        size_t end = i;
        while (end < in.size() && in_word(in[end])) end++;
        return in.substr(i, end - i);
    }

    // The position after the bracket that closes the one at `i`.
    size_t skip_brackets(size_t i) {
        int depth = 0;
        while (i < in.size()) {
            size_t end = skip_opaque(i);
            if (end != i) {
                i = end;
                continue;
            }
            char c = in[i++];
            if (c == '(' || c == '[' || c == '{') depth++;
            if ((c == ')' || c == ']' || c == '}') && --depth == 0) return i;
        }
        fail("finds no end of brackets");
    }

    std::string run() {
        while (at < in.size()) {
            size_t end = skip_opaque(at);
            if (end == at && in_word(in[at])) {
                std::string name = word(at);
                if (name == "asm") {
                    machine_code();
                    continue;
                }
                if (name == "extern" && word(skip_space(at + 6)) == "__shared__") {
                    at = skip_space(at + 6);
                    shared(true);
                    continue;
                }
                if (name == "__shared__") {
                    shared(false);
                    continue;
                }
                if (name == "__global__") kernel();
                end = at + name.size();
            }
            if (end == at) end++;
            out.append(in, at, end - at);
            at = end;
        }
        return out + "\n" + kernels;
    }

    // `__shared__ T name[n];` becomes a reference to an address in the block's memory.
    void shared(bool dynamic) {
        size_t from = skip_space(at + sizeof "__shared__" - 1), end = in.find(';', from);
        if (end == std::string::npos) fail("finds no end of a declaration");
        std::string align = "0";
        if (word(from) == "__align__") {
            size_t open = in.find('(', from), close = skip_brackets(open);
            align = in.substr(open, close - open);
            from = skip_space(close);
        }
        std::string text = in.substr(from, end - from);
        size_t dims = std::min(text.find('['), text.size()), last = dims;
        while (last > 0 && isspace((unsigned char)text[last - 1])) last--;
        size_t first = last;
        while (first > 0 && in_word(text[first - 1])) first--;
        std::string type = trim(text.substr(0, first)), name = text.substr(first, last - first);
        if (type.empty() || name.empty() || text.find(',', dims) != std::string::npos || text.find('=') != std::string::npos)
            fail("understands one variable in a declaration of shared memory: " + text);
        if (dynamic) {
            out += type + "* " + name + " = (" + type + "*)emulator_dynamic_shared()";
        } else {
            std::string number = std::to_string(counter++), whole = "emulator_type_" + number;
            out += "typedef " + type + " " + whole + text.substr(dims) + "; static char emulator_key_" + number + "; ";
            out += whole + "& " + name + " = *(" + whole + "*)emulator_shared(&emulator_key_" + number + ", sizeof(" +
                   whole + "), " + align + " ? " + align + " : alignof(" + whole + "))";
        }
        for (size_t i = at; i < end; i++)
            if (in[i] == '\n') out += '\n';
        at = end;
    }

    // `asm("a.b %0, [%1];" : "=r"(x) : "l"(p))` becomes `ptx_a_b((x), (p))`.
    void machine_code() {
        size_t start = at, open = skip_space(at + 3);
        if (word(open) == "volatile") open = skip_space(open + 8);
        if (in[open] != '(') fail("finds asm without brackets");
        size_t close = skip_brackets(open) - 1;
        std::string text;
        std::vector<std::string> operands;
        int section = 0;
        for (size_t i = open + 1; i < close;) {
            char c = in[i];
            if (c == '"') {
                size_t end = skip_opaque(i);
                if (section == 0) text += in.substr(i + 1, end - i - 2);
                i = end;
            } else if (c == '(') {
                size_t end = skip_brackets(i);
                if (section == 1 || section == 2) operands.push_back(in.substr(i, end - i));
                i = end;
            } else {
                section += c == ':';
                i++;
            }
        }
        out += "do { ";
        for (size_t from = 0; from < text.size();) {
            size_t end = std::min(text.find(';', from), text.size());
            out += instruction(text.substr(from, end - from), operands);
            from = end + 1;
        }
        out += "} while (0)";
        at = close + 1;
        for (size_t i = start; i < at; i++)
            if (in[i] == '\n') out += '\n';
    }

    std::string instruction(std::string text, const std::vector<std::string>& operands) {
        for (size_t i; (i = text.find("\\n")) != std::string::npos;) text.replace(i, 2, " ");
        for (size_t i; (i = text.find("\\t")) != std::string::npos;) text.replace(i, 2, " ");
        text = trim(text);
        if (text.empty()) return "";
        size_t end = text.find_first_of(" \t\n");
        std::string call = "ptx_" + text.substr(0, end);
        for (char& c : call)
            if (!in_word(c)) c = '_';
        call += "(";
        std::string rest = end == std::string::npos ? "" : text.substr(end), argument;
        bool first = true;
        for (size_t i = 0; i <= rest.size(); i++) {
            char c = i < rest.size() ? rest[i] : ',';
            if (c == '{' || c == '}' || c == '[' || c == ']') continue;
            if (c == '%') {
                size_t number = 0, digits = 0;
                for (; i + 1 < rest.size() && isdigit((unsigned char)rest[i + 1]); i++, digits++)
                    number = 10 * number + (rest[i + 1] - '0');
                if (!digits || number >= operands.size()) fail("does not understand the operands of " + text);
                argument += operands[number];
            } else if (c != ',') {
                argument += c;
            } else if (!trim(argument).empty()) {
                call += (first ? "" : ", ") + trim(argument);
                argument.clear();
                first = false;
            }
        }
        return call + "); ";
    }

    // Records `__global__ void [__launch_bounds__(n, m)] name(const Args a)`.
    void kernel() {
        size_t i = skip_space(at + sizeof "__global__" - 1);
        if (word(i) != "void") fail("expects a kernel to be `__global__ void name(Args args)`");
        i = skip_space(i + 4);
        std::string bounds = "0";
        if (word(i) == "__launch_bounds__") {
            size_t open = in.find('(', i), close = skip_brackets(open);
            std::string inside = in.substr(open + 1, close - open - 2);
            bounds = inside.substr(0, inside.find(','));
            i = skip_space(close);
        }
        std::string name = word(i);
        size_t open = skip_space(i + name.size());
        if (name.empty() || in[open] != '(') fail("expects a kernel to be `__global__ void name(Args args)`");
        size_t close = skip_brackets(open) - 1;
        std::string parameter = trim(in.substr(open + 1, close - open - 1));
        if (parameter.find(',') != std::string::npos) fail("expects kernels to have one structure of arguments: " + name);
        size_t end = parameter.size();
        while (end > 0 && in_word(parameter[end - 1])) end--;
        std::string type = trim(parameter.substr(0, end));
        if (type.empty()) fail("expects kernels to have one structure of arguments: " + name);
        kernels += "static void emulator_run_" + name + "(const void* args) { " + name + "(*(" + type + "*)args); }\n";
        kernels += "extern \"C\" { __attribute__((visibility(\"default\"))) extern const emulator::Kernel emulator_kernel_" +
                   name + " = {emulator_run_" + name + ", sizeof(" + type + "), (unsigned)(" + bounds + ")}; }\n";
    }
};

} // namespace

std::string translate(const std::string& source, const std::string& file) {
    Translator translator{source, file, "", ""};
    return translator.run();
}

} // namespace emulator
