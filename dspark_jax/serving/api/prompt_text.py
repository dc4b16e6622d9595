"""Special tokens and fixed texts of DeepSeek-V4 prompts.

The checkpoints were trained with exactly these strings, which the released prompt encoder (MIT
licence, DeepSeek) states; a changed character is another prompt.
"""

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK_BEGIN = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
TASK_TOKENS = {
    name: f"<｜{name}｜>"
    for name in ("action", "query", "authority", "domain", "title", "read_url")
}

TOOL_CALLS_BEGIN = f"<{DSML}tool_calls>"
TOOL_CALLS_END = f"</{DSML}tool_calls>"
INVOKE_BEGIN = f'<{DSML}invoke name="{{name}}">'
INVOKE_END = f"</{DSML}invoke>"
PARAMETER = f'<{DSML}parameter name="{{name}}" string="{{is_string}}">{{value}}</{DSML}parameter>'
TOOL_RESULT = "<tool_result>{text}</tool_result>"

RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"
)

MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)

TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "{TOOL_CALLS_BEGIN}" block like the following:

{TOOL_CALLS_BEGIN}
{INVOKE_BEGIN.format(name="$TOOL_NAME")}
{PARAMETER.format(name="$PARAMETER_NAME", is_string="true|false", value="$PARAMETER_VALUE")}
...
{INVOKE_END}
{INVOKE_BEGIN.format(name="$TOOL_NAME2")}
...
{INVOKE_END}
{TOOL_CALLS_END}

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_BEGIN}), \
you MUST output your complete reasoning inside {THINK_BEGIN}...{THINK_END} \
BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

{{schemas}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
