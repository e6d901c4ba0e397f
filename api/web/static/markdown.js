// The little Markdown that answers use: fences, headings, lists, bold, italics, code, links. It builds nodes and never
// parses HTML, so whatever a model writes stays text.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(\S(?:.*?\S)?)\*\*|\*(\S(?:.*?\S)?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

/** Shows `text` in `container`. Blocks that were there already stay, so a growing text may be selected and read. */
export function render(container, text) {
  const blocks = split(text);
  blocks.forEach((block, i) => {
    const shown = container.children[i];
    if (shown?.markdown === block.source) return;
    const node = build(block);
    node.markdown = block.source;
    if (shown) shown.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastChild.remove();
}

/** The blocks of a text, as {kind, lines, source}. */
function split(text) {
  const blocks = [];
  let open = null; // the block that the next line may still belong to
  let fence = null; // what closes the open fence
  const start = (kind, extra = {}) => {
    open = { kind, lines: [], source: `${kind}\n`, ...extra };
    blocks.push(open);
  };
  for (const line of text.split("\n")) {
    if (fence !== null) {
      if (line.trim().startsWith(fence) && !line.trim().slice(fence.length).replaceAll(fence[0], "")) {
        open = fence = null;
        continue;
      }
    } else {
      const found = FENCE.exec(line);
      if (found) {
        start("fence", { language: found[2] });
        open.source += `${found[2]}\n`;
        fence = found[1];
        continue;
      }
      if (!line.trim()) {
        open = null;
        continue;
      }
      const item = ITEM.exec(line);
      const kind = HEADING.test(line) ? "heading" : !item ? "paragraph" : item[1] ? "numbers" : "bullets";
      const goesOn = open && (open.kind === kind || (kind === "paragraph" && open.kind !== "heading"));
      if (!goesOn || kind === "heading") start(kind);
    }
    open.lines.push(line);
    open.source += `${line}\n`;
  }
  return blocks;
}

function build({ kind, lines, language }) {
  if (kind === "fence") {
    const pre = document.createElement("pre");
    const code = document.createElement("code");
    code.textContent = lines.join("\n");
    if (language) pre.dataset.language = language;
    pre.tabIndex = 0; // it scrolls sideways
    pre.append(code);
    return pre;
  }
  if (kind === "heading") {
    const [, marks, title] = HEADING.exec(lines[0]);
    return inline(document.createElement(`h${Math.min(6, marks.length + 2)}`), title);
  }
  if (kind === "paragraph") return inline(document.createElement("p"), lines.join("\n"));
  const list = document.createElement(kind === "numbers" ? "ol" : "ul");
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) {
      if (item[1] && !list.children.length) list.start = Number(item[1]);
      list.append(inline(document.createElement("li"), item[2]));
    } else inline(list.lastChild, `\n${line.trim()}`);
  }
  return list;
}

function inline(node, text) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , code, bold, italic, label, address] = found;
    node.append(text.slice(end, found.index));
    end = found.index + whole.length;
    const child = document.createElement(code !== undefined ? "code" : bold ? "strong" : italic ? "em" : "a");
    child.textContent = code ?? bold ?? italic ?? label;
    if (address) Object.assign(child, { href: address, rel: "noopener noreferrer", target: "_blank" });
    node.append(child);
  }
  node.append(text.slice(end));
  return node;
}
