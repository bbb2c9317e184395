// Elements from code. Text only ever becomes text nodes, so what a model writes can't become HTML.

export const byId = (id) => document.getElementById(id);

/** A new element: h("p", {class: "dim", onclick: f}, "text", child). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Writes text where it differs; an unchanged node keeps its layout. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** At most one call of `draw` for each frame, however often the result is called. */
export function oncePerFrame(draw) {
  let asked = 0;
  return () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
  };
}

/** Makes a parent's children from index `from` on equal to a tree of {tag, attrs, children} and
 *  strings, and touches only what differs: a reader's selection and scrolling stay. */
export function patch(parent, tree, from = 0) {
  tree.forEach((node, i) => {
    const old = parent.childNodes[from + i];
    const text = typeof node === "string";
    if (text && old?.nodeType === Node.TEXT_NODE) grow(old, node);
    else if (!text && old?.localName === node.tag && sameAttributes(old, node.attrs)) patch(old, node.children);
    else {
      const fresh = text ? node : h(node.tag, node.attrs);
      if (!text) patch(fresh, node.children);
      if (old) old.replaceWith(fresh);
      else parent.append(fresh);
    }
  });
  while (parent.childNodes.length > from + tree.length) parent.lastChild.remove();
}

function grow(node, text) {
  if (!text.startsWith(node.data)) node.data = text;
  else if (text !== node.data) node.appendData(text.slice(node.data.length));
}

function sameAttributes(element, attributes) {
  const given = Object.entries(attributes);
  return given.length === element.attributes.length && given.every(([name, value]) => element.getAttribute(name) === value);
}
