// The theme makes a landmark of every copy button; code and tables that scroll cannot be reached from the keyboard.
const mend = () => {
  for (const buttons of document.querySelectorAll(".md-code__nav")) buttons.setAttribute("role", "presentation");
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    part.tabIndex = part.scrollWidth > part.clientWidth ? 0 : -1;
};
new MutationObserver(mend).observe(document.body, {childList: true, subtree: true});
addEventListener("resize", mend);
mend();
