// What the browser sees of one page. `tests/docs/render.py` calls `look` in each page and reports the faults.

window.look = (narrow) => {
  const faults = [];
  const width = document.documentElement.clientWidth;
  const shown = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;
  const quoted = (text) => JSON.stringify(text.trim().replace(/\s+/g, " ").slice(0, 80));

  // Boxes that are closed at first have to fit too.
  const closed = [...document.querySelectorAll("details:not([open])")];
  for (const box of closed) box.open = true;

  // -- sideways overflow ----------------------------------------------------------------------------------
  const clips = (element) => {
    for (let up = element.parentElement; up && up !== document.body; up = up.parentElement)
      if (/auto|scroll|hidden|clip/.test(getComputedStyle(up).overflowX)) return true;
    return false;
  };
  const wide = [...document.body.querySelectorAll("*")].filter(
    (element) => shown(element) && element.getBoundingClientRect().right > width + 1 && !clips(element),
  );
  if (document.documentElement.scrollWidth > width + 1 || document.body.scrollWidth > width + 1 || wide.length) {
    const worst = wide.at(-1);
    faults.push(`is wider than the window${worst ? `: <${worst.localName}> ${quoted(worst.textContent)}` : ""}`);
  }
  const tabs = document.querySelector(".md-tabs__list");
  if (!narrow && tabs && shown(tabs) && tabs.scrollWidth > tabs.clientWidth + 1)
    faults.push("the tabs of the navigation do not fit into one line");

  // -- code that does not fit -----------------------------------------------------------------------------
  if (!narrow)
    for (const pre of document.querySelectorAll("pre")) {
      const scrolled = [pre, ...pre.querySelectorAll("code")].find((one) => one.scrollWidth > one.clientWidth + 1);
      if (!scrolled || !shown(pre)) continue;
      const lines = pre.innerText.split("\n");
      const longest = lines.reduce((a, b) => (b.length > a.length ? b : a), "");
      faults.push(`code is wider than its box (${longest.length} columns): ${quoted(longest)}`);
    }

  // -- pictures -------------------------------------------------------------------------------------------
  const light = (color) => {
    const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number);
    return a > 0.9 && 0.2126 * r + 0.7152 * g + 0.0722 * b > 160;
  };
  const dark = !light(getComputedStyle(document.body).backgroundColor);
  for (const image of document.images) {
    const name = image.getAttribute("src").slice(0, 80);
    if (!image.complete || !image.naturalWidth) faults.push(`picture is missing: ${name}`);
    else if (!image.alt && !image.closest(".jp-OutputArea")) faults.push(`picture has no alternative text: ${name}`);
    else if (dark && shown(image) && transparent(image) && !light(getComputedStyle(image).backgroundColor))
      faults.push(`picture is transparent on a dark page: ${name}`);
  }
  function transparent(image) {
    const canvas = Object.assign(document.createElement("canvas"), { width: 64, height: 64 });
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, 64, 64);
    const { data } = context.getImageData(0, 0, 64, 64);
    let clear = 0;
    for (let i = 3; i < data.length; i += 4) clear += data[i] < 250;
    return clear > 64;
  }

  // -- markup that was not rendered -----------------------------------------------------------------------
  const MARKUP = [
    [/(?<!\d)\*\*|\*\*(?!\d)/, "**"], // 2**62 is a number
    [/```|~~~/, "a fence of code"],
    [/(^|[^`])`[^`]+`/, "backticks"],
    [/\[[^\]]+\]\([^)\s]+\)/, "[text](link)"],
    [/\[[^\]]*\]\[[^\]]*\]/, "[text][name]"],
    [/\{:/, "{:"],
    [/\{\s*[.#][\w-]+/, "{ .class }"],
    [/:::/, ":::"],
    [/^\s*(!!!|\?\?\?)/m, "!!!"],
    [/^\s*\|.*\|\s*$/m, "a row of a table"],
    [/^\s*#{1,6} /m, "# heading"],
    [/<\/?[a-z][\w-]*(\s[^<>]*)?>/, "a tag"],
    [/&(amp|lt|gt|quot|nbsp|#\d+);/, "an entity"],
  ];
  const BLOCKS = "p, li, td, th, dt, dd, h1, h2, h3, h4, h5, h6, figcaption, summary, label, title, div";
  const said = new Set();
  for (const block of document.querySelectorAll(BLOCKS)) {
    // The block's own text: code stands as a dot, and blocks inside it speak for themselves.
    let text = "";
    const collect = (node) => {
      for (const child of node.childNodes) {
        if (child.nodeType === Node.TEXT_NODE) text += child.data;
        else if (child.nodeType !== Node.ELEMENT_NODE) continue;
        else if (child.matches("code, kbd, pre, samp")) text += "·";
        else if (!child.matches(`${BLOCKS}, script, style, template, svg, textarea, ul, ol, dl, table`)) collect(child);
      }
    };
    if (!shown(block) || block.closest("pre, code, .jp-OutputArea, script, svg, [data-md-component=search]")) continue;
    collect(block);
    for (const [pattern, name] of MARKUP)
      if (pattern.test(text) && !said.has(name + text)) {
        said.add(name + text);
        faults.push(`markup is not rendered (${name}): ${quoted(text)}`);
      }
  }

  for (const box of closed) box.open = false;
  return {
    faults,
    ids: [...document.querySelectorAll("[id], a[name]")].flatMap((one) => [one.id, one.name].filter(Boolean)),
    links: [...document.querySelectorAll("a[href], area[href]")].map((one) => one.href),
  };
};

// What each copy button puts on the clipboard. `watchCopies` has to run before the page does.
window.watchCopies = () => {
  window.copied = [];
  const keep = (text) => window.copied.push(text);
  document.execCommand = (command) => {
    const from = document.activeElement;
    if (command === "copy") keep(from && "value" in from ? from.value : String(getSelection()));
    return true;
  };
  Object.defineProperty(navigator, "clipboard", {
    value: { writeText: async (text) => keep(text), readText: async () => "" },
  });
};

window.pressCopyButtons = async () => {
  const found = [];
  const buttons = "button[data-clipboard-target], button[data-clipboard-text], clipboard-copy";
  for (const button of document.querySelectorAll(buttons)) {
    window.copied.length = 0;
    button.click();
    for (let tries = 0; tries < 20 && !window.copied.length; tries++) await new Promise((go) => setTimeout(go, 5));
    const box = button.closest("[class*=language-], [class*=highlight-], .jp-Cell") || button.parentElement;
    const language = /(?:language|highlight|hl)-(\w+)/.exec(box.className + " " + (box.innerHTML || ""));
    found.push({ language: language ? language[1] : "", text: window.copied[0] ?? null });
  }
  return found;
};
